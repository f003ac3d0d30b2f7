"""A run that ended leaves no weights in memory, so that one process can train many times."""

import gc
from pathlib import Path

import pytest
import torch

import tether
from tests.trainer.loops import Control, Text
from tests.trainer.tiny_run import write_inputs

ACTOR = "actor_rollout_ref.actor"
IN_BFLOAT16 = [
    f"{ACTOR}.fsdp_config.dtype=bfloat16",
    "critic.model.fsdp_config.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
]


def parameters_after(overrides: list[str]) -> list[torch.nn.Parameter]:
    """Parameters that are in memory when a run has ended and its result is dropped."""
    tether.train(overrides=overrides)
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is torch.nn.Parameter]


@pytest.mark.parametrize("more", [
    pytest.param([], id="float32"),
    pytest.param(IN_BFLOAT16, id="bfloat16"),
    pytest.param([*IN_BFLOAT16, "actor_rollout_ref.model.lora_rank=2"], id="lora"),
    pytest.param([*IN_BFLOAT16, "trainer.async_mode=fully_async"], id="asynchronous"),
])  # fmt: skip
def test_of_a_language_model_nothing_is_left(more: list[str], tmp_path: Path) -> None:
    before = parameters_after(Control().overrides(tmp_path / "first"))
    overrides = Text(write_inputs(tmp_path)).overrides(tmp_path / "run", *more)
    assert len(parameters_after(overrides)) == len(before)


@pytest.mark.parametrize("more", [[], ["policy.lstm_dim=8"]], ids=["feed-forward", "lstm"])
def test_of_a_control_policy_nothing_is_left(more: list[str], tmp_path: Path) -> None:
    before = parameters_after(Control().overrides(tmp_path / "first"))
    assert len(parameters_after(Control().overrides(tmp_path / "run", *more))) == len(before)
