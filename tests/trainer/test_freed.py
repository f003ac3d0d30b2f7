"""A run that ended leaves no weights in memory, so that one process can train many times."""

import gc
from pathlib import Path

import torch

import tether
from tests.trainer.loops import Control, Text

ACTOR = "actor_rollout_ref.actor"
IN_BFLOAT16 = [
    f"{ACTOR}.fsdp_config.dtype=bfloat16",
    "critic.model.fsdp_config.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
]
ONE_STEP = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"]
TEXT = {
    "float32": [],
    "bfloat16": IN_BFLOAT16,
    "lora": [*IN_BFLOAT16, "actor_rollout_ref.model.lora_rank=2"],
    "asynchronous": [*IN_BFLOAT16, "trainer.async_mode=fully_async", "trainer.total_training_steps=3"],
}
CONTROL = {"feed-forward": [], "lstm": ["policy.lstm_dim=8"]}


def test_nothing_is_left(inputs: Path, tmp_path: Path) -> None:
    runs = {name: Text(inputs).overrides(tmp_path / name, *ONE_STEP, *more) for name, more in TEXT.items()}
    runs |= {name: Control().overrides(tmp_path / name, *ONE_STEP, *more) for name, more in CONTROL.items()}
    left = {}
    gc.collect()
    gc.freeze()  # `gc.get_objects` returns only what comes after it
    for name, overrides in runs.items():
        tether.train(overrides=overrides)
        gc.collect()
        left[name] = sum(type(one) is torch.nn.Parameter for one in gc.get_objects())
    assert left == dict.fromkeys(runs, 0)
