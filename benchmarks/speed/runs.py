"""Whole training steps of tether: a run built from a configuration, as `tether train` builds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.speed.setting import Setting
from tether.config import load_config
from tether.loop.loop import Trainer
from tether.text.build import build_run
from tether.text.loading import DTYPE_KEYS

SAMPLES, NEW_TOKENS = 8, 64
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
COMMON = [
    "data.max_prompt_length=512",
    f"data.max_response_length={NEW_TOKENS}",
    "data.shuffle=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "trainer.total_training_steps=1000",
    *(f"{key}=bfloat16" for key in DTYPE_KEYS),  # as the peers, whatever is faster here
    "trainer.logger=file",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
]
GRPO = [*COMMON, "algorithm.adv_estimator=grpo"]
PPO = [
    *COMMON,
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "critic.ppo_max_token_len_per_gpu=8192",
    "critic.model.use_remove_padding=True",
    "critic.model.enable_gradient_checkpointing=False",
]


def prompts_of_step(setting: Setting) -> int:
    """Prompts that a step samples responses to."""
    return 2 if setting.quick else 4


@contextmanager
def running(setting: Setting, overrides: Sequence[str]) -> Iterator[Trainer]:
    """The trainer of a run in a scratch folder."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "reward.py").write_text(REWARD)
        truth = {"style": "rule", "ground_truth": "0"}
        rows = [{"data_source": "benchmark", "prompt": turns, "reward_model": truth} for turns in setting.messages]
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = [
            f"data.train_files={folder / 'train.jsonl'}",
            f"actor_rollout_ref.model.path={setting.model}",
            f"custom_reward_function.path={folder / 'reward.py'}",
            f"trainer.default_local_dir={folder / 'run'}",
            f"data.train_batch_size={prompts_of_step(setting)}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts_of_step(setting)}",
        ]
        run = build_run(load_config(None, [*files, *overrides]))
        try:
            yield run.trainer
        finally:
            run.close()


def one_step(trainer: Trainer) -> dict[str, float]:
    """The next training step; returns its metrics."""
    return trainer.advance()


def share_of_limit(setting: Setting, metrics: Sequence[Mapping[str, float]]) -> float:
    """The time that the products of the steps' phases would take at the rate of a large one, over the steps' time."""
    roof, prompts = setting.roofline, prompts_of_step(setting)
    responses = prompts * SAMPLES * NEW_TOKENS
    total = sum(step["perf/total_num_tokens"] for step in metrics) / len(metrics)
    of_prompts = int((total - responses) / SAMPLES)
    computed = of_prompts + responses
    parts = {
        "gen": roof.generating(prompts, of_prompts, prompts * SAMPLES, NEW_TOKENS),
        "old_log_prob": roof.training(computed, responses, passes=1),
        "ref": roof.training(computed, responses, passes=1),
        "values": roof.training(computed, 0, passes=1),
        "update_critic": roof.training(computed, 0),
        "update_actor": roof.training(computed, responses),
    }
    done = [phase for phase in parts if f"timing_s/{phase}" in metrics[0]]
    return sum(parts[phase] for phase in done) / median_seconds(metrics, "step")


def median_seconds(metrics: Sequence[Mapping[str, float]], phase: str) -> float:
    """Of a phase of these steps, or of the whole ``step``."""
    return median(step[f"timing_s/{phase}"] for step in metrics)
