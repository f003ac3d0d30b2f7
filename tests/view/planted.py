"""Runs in which something is planted, written by the very writers of a run: python -m tests.view.planted FOLDER

Each answers a question that a person has: fell (why did the score fall at step 60?), never (which prompts never
succeed?), a_* and b_* (is B better than A?), hacked (which part of the reward is exploited?), critic (is the critic
useful?), robot (where does the robot fall?).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo, Sample
from tether.metrics.records import RecordFile, pack

PROMPTS, ANSWERS = 8, 4
FILLER = [" We", " add", " them", " twice", ":", " one", " after", " another", ".", "\n"]
VOCABULARY = [*FILLER, "The", " answer", " is", *(f" {number}" for number in range(2 * PROMPTS))]
Numbers = dict[str, float]


@dataclass
class Row:
    """A response of a planted run."""

    prompt: int
    reward: float
    parts: Numbers = field(default_factory=dict)
    length: int = 40
    is_cut: bool = False

    @property
    def is_right(self) -> bool:
        return self.parts.get("acc", self.reward) > 0.5

    @property
    def pieces(self) -> list[str]:
        """Its tokens: the answer and how it was found; one that is cut and wrong does not come to an answer."""
        answer = ["The", " answer", " is", f" {2 * self.prompt if self.is_right else 2 * self.prompt + 1}", "."]
        answer = answer[-self.length :] if self.is_right or not self.is_cut else []
        return answer + [FILLER[at % len(FILLER)] for at in range(self.length - len(answer))]


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
    config: Mapping[str, object] | None = None,
    warn_at: Mapping[int, str] | None = None,
    *,
    validates: bool = True,
    limit: int = 80,
) -> Path:
    """Write a run of a language model, whose metrics of scores and lengths are those of its responses.

    Args:
        folder: where.
        steps: number of steps.
        seed: seed of its noise.
        metrics: the metrics of a step; its score and mean length are what the responses are made for.
        reward: called with (step, index of the prompt, noise): the reward and its parts; without it the share of the
            score has 1 and the others 0.
        config: its configuration.
        warn_at: warnings by step.
        validates: whether it is validated every tenth step, with the accuracy of training.
        limit: maximum length of a response.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    logger = JsonlLogger(RunInfo(folder, "planted", folder.name, dict(config or text_config()), steps))
    recorder = RecordFile(folder, 2_000_000, None)
    for step in range(1, steps + 1):
        logged = metrics(step, rng)
        rows = responses(step, logged, reward, limit, rng)
        rewards = np.array([row.reward for row in rows]).reshape(PROMPTS, ANSWERS)
        lengths = [row.length for row in rows]
        logged |= {
            "critic/score/mean": float(rewards.mean()), "critic/score/max": float(rewards.max()),
            "critic/score/min": float(rewards.min()),
            "group/zero_std_fraction": float(np.mean(np.ptp(rewards, axis=1) == 0)),
            "response_length/mean": float(np.mean(lengths)),
            "response_length/clip_ratio": float(np.mean([row.is_cut for row in rows])),
            "perf/total_num_tokens": float(sum(lengths) + 6 * len(rows)),
        }  # fmt: skip
        for name in rows[0].parts:
            logged[f"reward/extra/{name}/mean"] = float(np.mean([row.parts[name] for row in rows]))
        if message := (warn_at or {}).get(step):
            logger.keep_warning(message)
        if validates and step % 10 == 0:
            right = round(20 * float(np.mean([row.is_right for row in rows])))
            logger.log_samples(step, validation_samples(right))
            logged["val-core/math/acc/mean@1"] = right / 20
        logger.log(step, logged)
        record_step(recorder, step, rows, rng)
    logger.close()
    return folder


def responses(step: int, metrics: Numbers, reward: Any, limit: int, rng: np.random.Generator) -> list[Row]:
    """Return the responses of a step whose mean reward and length are those of its metrics."""
    count, mean = PROMPTS * ANSWERS, metrics["response_length/mean"]
    lengths = np.minimum(rng.integers(round(0.7 * mean), round(1.3 * mean) + 1, count), limit)
    solved = np.zeros(count)
    # The complete ones first: a response that is cut has no answer.
    order = np.lexsort((rng.random(count), lengths >= limit))
    solved[order[: round(count * metrics["critic/score/mean"])]] = 1.0
    rows = []
    for at in range(count):
        prompt = at // ANSWERS
        scored = reward(step, prompt, rng) if reward else (solved[at], {"acc": solved[at], "format": 1.0})
        rows.append(Row(prompt, float(scored[0]), scored[1], int(lengths[at]), bool(lengths[at] >= limit)))
    return rows


def validation_samples(right: int) -> list[Sample]:
    answers = [2 * row if row < right else 2 * row + 1 for row in range(20)]
    return [
        Sample(row, "math", f"<s>What is {row} + {row}?", f"It is {answer}.", float(row < right), str(2 * row))
        for row, answer in enumerate(answers)
    ]


def record_step(recorder: RecordFile, step: int, rows: Sequence[Row], rng: np.random.Generator) -> None:
    count = len(rows)
    rewards = np.array([row.reward for row in rows], dtype=np.float32)
    groups = np.array([row.prompt for row in rows], dtype=np.int32)
    advantages = rewards - np.array([rewards[groups == group].mean() for group in groups])
    lengths = np.array([row.length for row in rows], dtype=np.int32)
    names = {name for row in rows for name in row.parts}
    weight, log_ratios = np.abs(advantages) * lengths, rng.normal(0, 0.1, count)
    columns = {
        "index": groups, "group": groups, "reward": rewards, "length": lengths,
        "truncated": np.array([row.is_cut for row in rows]),
        "ratio": np.exp(log_ratios).astype(np.float32), "advantage": advantages.astype(np.float32),
        "moved": (advantages * log_ratios).astype(np.float32),
        "entropy": rng.uniform(0.5, 1, count).astype(np.float32),
        "gradient_share": (weight / max(weight.sum(), 1e-9)).astype(np.float32),
    }  # fmt: skip
    for name in names:
        columns[f"part/{name}"] = np.array([row.parts.get(name, np.nan) for row in rows], dtype=np.float32)
    with recorder.recording(step) as add:
        add("columns", {name: pack(column) for name, column in columns.items()})
        chosen = {int(np.argmax(rewards)): ["best"], int(np.argmin(rewards)): ["worst"]}
        add("tokens", {"rows": [_tokens(at, why, rows[at], rng) for at, why in chosen.items()], "left_out": 0})
        add(
            "texts",
            {
                "prompts": {
                    str(prompt): {"index": prompt, "data_source": "math", "prompt": f"What is {prompt} + {prompt}?",
                                  "ground_truth": str(2 * prompt)}
                    for prompt in range(PROMPTS)
                },
                "rows": [
                    {"response": "".join(row.pieces),
                     "extra": {**row.parts, "reason": "right" if row.is_right else "cut" if row.is_cut
                               else "expected another number"}}
                    for row in rows
                ],
            },
        )  # fmt: skip


def _tokens(at: int, why: list[str], row: Row, rng: np.random.Generator) -> dict:
    length, prompt, reward, pieces = row.length, row.prompt, row.reward, row.pieces
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
    return {
        "row": at,
        "reasons": why,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{prompt} + {prompt}?"}],
        "prompt": f"<s>[user] What is {prompt} + {prompt}?</s>",
        "response": "".join(pieces),
        "prompt_ids": pack(np.arange(6, dtype=np.int32)),
        "response_ids": pack(np.array([VOCABULARY.index(piece) for piece in pieces], dtype=np.int32)),
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


def write_control(folder: Path, steps: int = 30, falls: bool = True, pictures: bool = False) -> Path:
    """Write a run of a robot that learns to go faster.

    Either it falls in each episode, the first environment's at step 37, which its critic notices there; or it goes on
    until the episode is over.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    logger = JsonlLogger(RunInfo(folder, "planted", folder.name, control_config(), steps))
    recorder = RecordFile(folder, 2_000_000, None)
    for step in range(1, steps + 1):
        walks = [_walk(step, fall if falls else None, rng, pictures) for fall in (37, 33, 36, 34)]
        returns = np.array([walk["values"]["rewards"].sum() for walk in walks], dtype=np.float32)
        lengths = np.array([len(walk["values"]["rewards"]) for walk in walks], dtype=np.int32)
        values, targets = (np.concatenate([walk["values"][key] for walk in walks]) for key in ("values", "returns"))
        half = 1.96 * float(returns.std()) / 2
        logger.log(step, {
            "env/return": float(returns.mean()), "env/episode_len": float(lengths.mean()), "env/success_once": 0.0,
            "eval/return": float(returns.mean()), "eval/return_low": float(returns.mean()) - half,
            "eval/return_high": float(returns.mean()) + half,
            "actor/ppo_kl": 0.01, "actor/entropy": 1.4 - 0.01 * step, "actor/pg_clipfrac": 0.1, "actor/ratio_max": 1.4,
            "critic/vf_explained_var": 1 - float((targets - values).var() / targets.var()),
            "critic/values/mean": float(values.mean()), "critic/returns/mean": float(targets.mean()),
            "timing_s/step": 0.5, "timing_s/gen": 0.3, "timing_s/update_actor": 0.2, "perf/env_steps": 256.0 * step,
        })  # fmt: skip
        columns = {
            "env": np.arange(4, dtype=np.int32), "first": np.zeros(4, dtype=np.int32), "return": returns,
            "length": lengths, "from_start": np.ones(4, dtype=bool), "terminated": np.full(4, falls),
            "truncated": np.full(4, not falls), "success": np.array([False, True] * 2) | (not falls),
            "seed": np.array([step, -1] * 2), "task": np.array([0, 1] * 2, dtype=np.int32),
        }  # fmt: skip
        reasons = {int(np.argmax(returns)): ["best"]}
        reasons.setdefault(int(np.argmin(returns)), []).append("worst")
        rows = [
            walks[at] | {"segment": at, "reasons": why, "env": at, "first": 0, "left_out": []} | {
                "values": {name: pack(column.astype(np.float32)) for name, column in walks[at]["values"].items()}
            }
            for at, why in reasons.items()
        ]  # fmt: skip
        layout = {"state": {"kind": "vector", "shape": [2]}}
        if pictures:
            layout["camera"] = {"kind": "image", "shape": [24, 32, 3]}
        with recorder.recording(step) as add:
            add("columns", {name: pack(column) for name, column in columns.items()} | {"tasks": ["walk", "stand up"]})
            add("episodes", {"rows": rows, "left_out": 0, "observation": layout, "chunk": 1})
    logger.close()
    return folder


def _walk(step: int, fall: int | None, rng: np.random.Generator, pictures: bool) -> dict[str, Any]:
    """Return an episode of a robot that falls at step `fall` and ends 8 steps later; without it, one of 60 steps."""
    length, gamma, speed = 60 if fall is None else fall + 8, 0.99, 0.5 + 0.02 * step
    upright = length if fall is None else fall
    height = np.concatenate([np.ones(upright), np.linspace(0.8, 0.1, length - upright + 1)])
    rewards = np.concatenate([np.full(upright, speed), np.full(length - upright, 0.1)]) + rng.normal(0, 0.01, length)
    returns = np.zeros(length + 1)
    for at in reversed(range(length)):
        returns[at] = rewards[at] + gamma * returns[at + 1]
    # As long as the robot stands, its critic expects it to do so for 60 steps.
    expected = speed * (1 - gamma ** (60 - np.arange(length))) / (1 - gamma)
    values = np.where(np.arange(length) < upright, expected, returns[:-1]) + rng.normal(0, 0.05, length)
    state = np.stack([height + rng.normal(0, 0.01, length + 1), np.sin(np.arange(length + 1) / 3)], axis=1)
    observations = {"state": pack(state.astype(np.float32))}
    if pictures:
        observations["camera"] = pack(_pictures(height))
    return {
        "observations": observations,
        "actions": pack(np.sin(np.arange(2 * length) / 5).reshape(length, 2).astype(np.float32)),
        "values": {
            "rewards": rewards, "shaped_rewards": rewards, "values": values, "returns": returns[:-1],
            "advantages": returns[:-1] - values, "log_probs": -np.ones(length),
        },
    }  # fmt: skip


def _pictures(height: np.ndarray) -> np.ndarray:
    """Return a film of a bar as high as the robot."""
    frames = np.full((len(height), 24, 32, 3), 235, dtype=np.uint8)
    for frame, up in zip(frames, height, strict=True):
        frame[23 - round(20 * float(up)) : 23, 14:18] = (40, 90, 200)
    return frames


def fell(step: int, rng: np.random.Generator) -> Numbers:
    """The learning rate is raised at step 58, the policy jumps, and the score is lost at step 60."""
    metrics = healthy(step, rng)
    if step >= 58:
        metrics["actor/lr"] = 1e-3
    if step >= 59:
        metrics |= {"actor/ppo_kl": 2.5, "actor/grad_norm": 40.0}
    if step >= 60:
        metrics["critic/score/mean"] = 0.12 + 0.01 * float(rng.normal())
    return metrics


def never(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    """Prompts 3 and 6 are never solved."""
    solved = float(prompt not in (3, 6) and rng.random() < 0.3 + 0.005 * step)
    return solved, {"acc": solved, "format": 1.0}


def hacked(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    """The part `politeness` rises to its highest value, while the accuracy is lost, in validation too."""
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
