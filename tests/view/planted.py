"""Runs in which something is planted, written by the very writers of a run: python -m tests.view.planted FOLDER

Each answers a question that a person has: fell (why did the score fall at step 60?), never (which prompts never
succeed?), a_* and b_* (is B better than A?), hacked (which part of the reward is exploited?), critic (is the critic
useful?), robot (where does the robot fall?).
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo, Sample
from tether.metrics.records import RecordFile, pack

PROMPTS, ANSWERS = 8, 4
WORDS = ["The", " answer", " is", " 4", "2", ".", " So", " we", " add", " them", "\n", " 7", " <", "b", ">"]
Numbers = dict[str, float]


def text_config(**changes: object) -> dict[str, Any]:
    trainer = {"seed": 1, "default_local_dir": "run", "total_training_steps": 100}
    config: dict[str, Any] = {
        "trainer": trainer,
        "data": {"train_files": ["math.jsonl"], "train_batch_size": PROMPTS},
        "env": {"train": {"id": None}},
        "algorithm": {"gamma": 1.0, "adv_estimator": "gae"},
        "actor_rollout_ref": {
            "model": {"path": "tiny"},
            "rollout": {"n": ANSWERS},
            "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "optim": {"lr": 1e-5}},
        },
    }
    for path, value in changes.items():
        *parents, name = path.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        section[name] = value
    return config


def healthy(step: int, rng: np.random.Generator, steps: int = 100) -> Numbers:
    """Metrics of a run that learns."""
    progress = step / steps

    def noisy(value: float, noise: float = 0.02) -> float:
        return value + noise * float(rng.normal())

    return {
        "critic/score/mean": noisy(0.2 + 0.5 * progress),
        "response_length/mean": noisy(60 - 5 * progress, 1.0),
        "response_length/clip_ratio": abs(noisy(0.03, 0.01)),
        "actor/ppo_kl": abs(noisy(0.002, 0.0004)),
        "actor/reward_kl_penalty": 0.01 + 0.05 * progress,
        "actor/entropy": noisy(1.2 - 0.6 * progress, 0.01),
        "actor/pg_clipfrac": abs(noisy(0.05, 0.005)),
        "actor/ratio_mean": noisy(1.0, 0.001),
        "actor/ratio_max": noisy(1.5, 0.05),
        "actor/first_update/ratio_max": 1.0,
        "actor/grad_norm": noisy(1.0, 0.05),
        "actor/lr": 1e-5,
        "training/rollout_probs_diff_mean": abs(noisy(0.0002, 0.00002)),
        "critic/vf_explained_var": noisy(0.1 + 0.6 * progress),
        "critic/values/mean": noisy(0.2 + 0.45 * progress),
        "critic/returns/mean": noisy(0.2 + 0.5 * progress),
        "group/zero_std_fraction": abs(noisy(0.3, 0.05)),
        "reward/error_rate": 0.0,
        "timing_s/step": 2.0,
        "timing_s/gen": 1.2,
        "timing_s/update_actor": 0.6,
        "timing_s/update_critic": 0.2,
        "perf/total_num_tokens": 3000.0,
    }


def write_text(
    folder: Path,
    steps: int = 100,
    seed: int = 0,
    metrics: Callable[[int, np.random.Generator], Numbers] = healthy,
    reward: Callable[[int, int, np.random.Generator], tuple[float, Numbers]] | None = None,
    texts: Callable[[int, int], str] | None = None,
    config: Mapping[str, object] | None = None,
    warn_at: Mapping[int, str] | None = None,
    *,
    validates: bool = True,
) -> Path:
    """Write a run of a language model.

    Args:
        folder: where.
        steps: number of steps.
        seed: seed of its noise.
        metrics: the metrics of a step.
        reward: called with (step, index of the prompt, noise): the reward and its parts.
        texts: the response, called with (step, row).
        config: its configuration.
        warn_at: warnings by step.
        validates: whether it is validated every tenth step, with the score of training.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    logger = JsonlLogger(RunInfo(folder, "planted", folder.name, dict(config or text_config()), steps))
    recorder = RecordFile(folder, 2_000_000, None)
    for step in range(1, steps + 1):
        logged = metrics(step, rng)
        rows = [(prompt, *_scored(reward, step, prompt, rng)) for prompt in range(PROMPTS) for _ in range(ANSWERS)]
        logged["critic/score/mean"] = (
            logged["critic/score/mean"] if reward is None else float(np.mean([r for _, r, _ in rows]))
        )
        if message := (warn_at or {}).get(step):
            logger.keep_warning(message)
        if validates and step % 10 == 0:
            logger.log_samples(step, validation_samples(logged["critic/score/mean"]))
            logged["val-core/math/acc/mean@1"] = round(20 * min(max(logged["critic/score/mean"], 0), 1)) / 20
        logger.log(step, logged)
        record_step(recorder, step, rows, rng, texts)
    logger.close()
    return folder


def _scored(reward: Any, step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    if reward is not None:
        return reward(step, prompt, rng)
    solved = float(rng.random() < 0.2 + 0.005 * step)
    return solved, {"acc": solved, "format": 1.0}


def validation_samples(share: float) -> list[Sample]:
    return [
        Sample(
            row, "math", f"<s>What is {row} + {row}?", f"It is {2 * row}.", float(row < round(20 * share)), str(2 * row)
        )
        for row in range(20)
    ]


def record_step(recorder: RecordFile, step: int, rows: list, rng: np.random.Generator, texts: Any) -> None:
    count = len(rows)
    rewards = np.array([reward for _, reward, _ in rows], dtype=np.float32)
    groups = np.array([prompt for prompt, _, _ in rows], dtype=np.int32)
    advantages = rewards - np.array([rewards[groups == group].mean() for group in groups])
    lengths = rng.integers(20, 80, count).astype(np.int32)
    names = {name for _, _, parts in rows for name in parts}
    weight = np.abs(advantages) * lengths
    columns = {
        "index": groups, "group": groups, "reward": rewards, "length": lengths, "truncated": lengths > 76,
        "ratio": np.exp(rng.normal(0, 0.1, count)).astype(np.float32), "advantage": advantages.astype(np.float32),
        "entropy": rng.uniform(0.5, 1, count).astype(np.float32),
        "gradient_share": (weight / max(weight.sum(), 1e-9)).astype(np.float32),
    }  # fmt: skip
    for name in names:
        columns[f"part/{name}"] = np.array([parts.get(name, np.nan) for _, _, parts in rows], dtype=np.float32)
    with recorder.recording(step) as add:
        add("columns", {name: pack(column) for name, column in columns.items()})
        chosen = {int(np.argmax(rewards)): ["best"], int(np.argmin(rewards)): ["worst"]}
        add("tokens", {"rows": [_tokens(row, why, rows, lengths, rng) for row, why in chosen.items()], "left_out": 0})
        add(
            "texts",
            {
                "prompts": {
                    str(prompt): {"index": prompt, "data_source": "math", "prompt": f"What is {prompt} + {prompt}?",
                                  "ground_truth": str(2 * prompt)}
                    for prompt in range(PROMPTS)
                },
                "rows": [
                    {"response": texts(step, row) if texts else f"The answer is {2 * prompt if reward else 7}.",
                     "extra": {**parts, "reason": "right" if reward > 0.5 else "expected another number"}}
                    for row, (prompt, reward, parts) in enumerate(rows)
                ],
            },
        )  # fmt: skip


def _tokens(row: int, why: list[str], rows: list, lengths: np.ndarray, rng: np.random.Generator) -> dict:
    length, (prompt, reward, _) = int(lengths[row]), rows[row]
    ids = rng.integers(0, len(WORDS), length).astype(np.int32)
    old = -rng.exponential(0.7, length).astype(np.float32)
    values = np.linspace(0.4, reward, length).astype(np.float32) + rng.normal(0, 0.05, length).astype(np.float32)
    rewards = np.zeros(length, dtype=np.float32)
    rewards[-1] = reward
    mask = np.ones(length, dtype=bool)
    mask[5:8] = False
    by_token = {
        "sampler_log_probs": old + rng.normal(0, 1e-3, length), "old_log_probs": old,
        "new_log_probs": old + rng.normal(0, 0.15, length), "ref_log_probs": old - 0.1,
        "entropy": rng.uniform(0, 2, length), "advantages": reward - values, "values": values,
        "returns": np.full(length, reward), "rewards": rewards,
    }  # fmt: skip
    pieces = [WORDS[token] for token in ids]
    return {
        "row": row,
        "reasons": why,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{prompt} + {prompt}?"}],
        "prompt": f"<s>[user] What is {prompt} + {prompt}?</s>",
        "response": "".join(pieces),
        "prompt_ids": pack(np.arange(6, dtype=np.int32)),
        "response_ids": pack(ids),
        "pieces": pieces,
        "mask": pack(mask),
        "values": {name: pack(column.astype(np.float32)) for name, column in by_token.items()},
    }


def control_config(**changes: object) -> dict[str, Any]:
    return {
        "trainer": {"seed": 1, "default_local_dir": "run", **changes},
        "env": {"train": {"id": "Walker"}, "eval": {"video_cfg": {"save_video": False}}},
        "algorithm": {"gamma": 0.99},
    }


def write_control(folder: Path, steps: int = 30, fall: int = 37, pictures: bool = False) -> Path:
    """Write a run of a robot that falls at step `fall` of an episode, which its critic notices there."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    logger = JsonlLogger(RunInfo(folder, "planted", folder.name, control_config(), steps))
    recorder = RecordFile(folder, 2_000_000, None)
    for step in range(1, steps + 1):
        logger.log(step, {
            "env/return": 40 + step + float(rng.normal()), "env/episode_len": 45.0, "env/success_once": 0.1,
            "eval/return": 42.0 + step, "eval/return_low": 38.0 + step, "eval/return_high": 46.0 + step,
            "actor/ppo_kl": 0.01, "actor/entropy": 1.4 - 0.01 * step, "actor/pg_clipfrac": 0.1, "actor/ratio_max": 1.4,
            "critic/vf_explained_var": 0.5 + 0.01 * step, "critic/values/mean": 5.0, "critic/returns/mean": 5.2,
            "timing_s/step": 0.5, "timing_s/gen": 0.3, "timing_s/update_actor": 0.2, "perf/env_steps": 256.0 * step,
        })  # fmt: skip
        length = fall + 8
        height = np.concatenate([np.ones(fall), np.linspace(0.8, 0.1, length - fall + 1)]) + rng.normal(
            0, 0.01, length + 1
        )
        values = np.concatenate([np.full(fall, 6.0), np.full(length - fall, 1.0)]) + rng.normal(0, 0.05, length)
        rewards = np.concatenate([np.ones(fall), np.full(length - fall, 0.1)])
        state = np.stack([height, np.sin(np.arange(length + 1) / 3)], axis=1)
        observed = {"state": pack(state.astype(np.float32))}
        layout = {"state": {"kind": "vector", "shape": [2]}}
        if pictures:
            observed["camera"] = pack(rng.integers(0, 255, (length + 1, 24, 32, 3), dtype=np.uint8))
            layout["camera"] = {"kind": "image", "shape": [24, 32, 3]}
        columns = {
            "env": np.arange(4, dtype=np.int32), "first": np.zeros(4, dtype=np.int32),
            "return": np.array([rewards.sum(), 20, 10, 30], dtype=np.float32), "length": np.array([length, 30, 20, 40]),
            "from_start": np.ones(4, dtype=bool), "terminated": np.ones(4, dtype=bool),
            "truncated": np.zeros(4, dtype=bool),
        }  # fmt: skip
        with recorder.recording(step) as add:
            add("columns", {name: pack(column) for name, column in columns.items()})
            row = {
                "segment": 0, "reasons": ["best"], "env": 0, "first": 0, "left_out": [], "observations": observed,
                "actions": pack(np.sin(np.arange(2 * length) / 5).reshape(length, 2).astype(np.float32)),
                "values": {name: pack(column.astype(np.float32)) for name, column in {
                    "rewards": rewards, "shaped_rewards": rewards, "values": values, "returns": values + 0.1,
                    "advantages": rewards - rewards.mean(), "log_probs": -np.ones(length)}.items()},
            }  # fmt: skip
            add("episodes", {"rows": [row], "left_out": 3, "observation": layout, "chunk": 1})
    logger.close()
    return folder


def fell(step: int, rng: np.random.Generator) -> Numbers:
    """The learning rate is raised at step 58, the policy jumps, and the score is lost at step 60."""
    metrics = healthy(step, rng)
    if step >= 58:
        metrics["actor/lr"] = 1e-3
    if step >= 59:
        metrics |= {"actor/ppo_kl": 2.5, "actor/grad_norm": 40.0}
    if step >= 60:
        metrics["critic/score/mean"] = 0.05 + 0.01 * float(rng.normal())
    return metrics


def never(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    """Prompts 3 and 6 are never solved."""
    solved = float(prompt not in (3, 6) and rng.random() < 0.3 + 0.005 * step)
    return solved, {"acc": solved, "format": 1.0}


def hacked(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    """The part `politeness` rises to its highest value, while the accuracy is lost."""
    acc = float(rng.random() < max(0.05, 0.6 - 0.007 * step))
    polite = min(1.0, 0.1 + 0.01 * step + 0.02 * float(rng.normal()))
    return acc + polite, {"acc": acc, "politeness": polite, "format": 1.0}


def useless(step: int, rng: np.random.Generator) -> Numbers:
    """A critic that is worse than a constant."""
    return healthy(step, rng) | {"critic/vf_explained_var": -0.4 + 0.05 * float(rng.normal())}


def level(gain: float, seed_noise: float) -> Callable[[int, np.random.Generator], Numbers]:
    """A run whose final score is `gain` higher than usual, give or take the noise of its seed."""
    offset: list[float] = []

    def metrics(step: int, rng: np.random.Generator) -> Numbers:
        if not offset:
            offset.append(gain + seed_noise * float(rng.normal()))
        logged = healthy(step, rng)
        logged["critic/score/mean"] += offset[0] * min(1.0, step / 50)
        return logged

    return metrics


def write_all(folder: Path) -> Path:
    """Write the runs of all questions."""
    write_text(
        folder / "fell", metrics=fell, warn_at={59: "the policy moved by 2.5 nats per token in one step (actor/ppo_kl)"}
    )
    write_text(folder / "never", reward=never)
    write_text(folder / "hacked", reward=hacked)
    write_text(folder / "critic", metrics=useless)
    for seed in range(4):
        for name, gain, lr in (("a", 0.0, 1e-5), ("b", 0.2, 3e-5)):
            config = text_config(actor_rollout_ref__actor__optim__lr=lr, trainer__seed=seed)
            write_text(
                folder / "compared" / f"{name}_{seed}",
                seed=seed + 10 * (gain > 0),
                metrics=level(gain, 0.02),
                config=config,
            )
    write_control(folder / "robot", pictures=True)
    return folder


if __name__ == "__main__":
    print(write_all(Path(sys.argv[1])))
