"""A run that ended leaves no weights in memory, so that one process can train many times."""

import gc
from pathlib import Path

import pytest
import torch

import tether
from tests.runs.loops import Control, Text
from tests.runs.tiny_run import LIGHT

ACTOR = "actor_rollout_ref.actor"
IN_BFLOAT16 = [
    f"{ACTOR}.fsdp_config.dtype=bfloat16",
    "critic.model.fsdp_config.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
]
NOT_BEFORE = "trainer.preflight=False"
ONE_STEP = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"]


def parameters_left(runs: dict[str, list[str]]) -> dict[str, int]:
    """Return how many parameters are in memory after each run, of those that came with any of them."""
    left = {}
    gc.collect()
    gc.freeze()  # `gc.get_objects` returns only what comes after it
    for name, overrides in runs.items():
        tether.train(overrides=overrides)
        gc.collect()
        left[name] = sum(type(one) is torch.nn.Parameter for one in gc.get_objects())
    return left


def test_of_a_language_model_nothing_is_left(inputs: Path, tmp_path: Path) -> None:
    options = {
        "float32": [],
        "lora": [*IN_BFLOAT16, "actor_rollout_ref.model.lora_rank=2", NOT_BEFORE],
        "asynchronous": [*IN_BFLOAT16, "trainer.async_mode=fully_async", "trainer.total_training_steps=2", NOT_BEFORE],
    }
    loop = Text(inputs, *LIGHT)
    runs = {name: loop.overrides(tmp_path / name, *ONE_STEP, *more) for name, more in options.items()}
    assert parameters_left(runs) == dict.fromkeys(runs, 0)


def test_of_a_control_policy_nothing_is_left(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    options = {"feed-forward": [], "lstm": ["policy.lstm_dim=8"]}
    runs = {name: Control().overrides(tmp_path / name, *ONE_STEP, *more) for name, more in options.items()}
    assert parameters_left(runs) == dict.fromkeys(runs, 0)
