"""A rank that has no memory for a micro-batch: the run goes on with half of it, and says so once."""

from pathlib import Path

import pytest

from tests.runs.test_devices import overrides
from tests.runs.tiny_run import measured, same, weights, write_inputs
from tether.commands.train import train
from tether.config import load_config

KEY = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
OTHERS = [
    f"{key}=2"
    for key in (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.forward_micro_batch_size_per_gpu",
    )
]
"""They would inherit the first value, and round otherwise."""
LOSS = '''
"""The clipped loss, for which rank 1 has memory for one row at a time."""

import torch
import torch.distributed as dist

from tether.algorithms import POLICY_LOSSES


def vanilla(log_probs, old_log_probs, advantages, response_mask, *, clip_ratio_low=0.2, clip_ratio_high=0.2):
    is_check = log_probs.shape == (4, 3)  # of the function itself, when it is loaded
    if not is_check and dist.get_rank() == 1 and len(log_probs) > 1:
        torch.empty(2**60)  # a real refusal of the allocator
    return POLICY_LOSSES["vanilla"](
        log_probs, old_log_probs, advantages, response_mask, clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
    )
'''


def run(inputs: Path, folder: Path, *more: str) -> Path:
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={inputs / 'loss.py'}:vanilla"
    given = [*overrides(inputs, folder, 2, 2), "trainer.preflight=False", loss, *OTHERS, *more]
    return train(load_config(None, given)).folder


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_micro_batches_are_halved_where_one_rank_has_no_memory(tmp_path: Path, capsys) -> None:
    inputs = write_inputs(tmp_path)
    (inputs / "loss.py").write_text(LOSS)
    fits = run(inputs, tmp_path / "fits", f"{KEY}=1")
    assert "out of memory" not in capsys.readouterr().out
    halved = run(inputs, tmp_path / "halved", f"{KEY}=4")
    said = capsys.readouterr().out
    assert f"rank 1: out of memory in a forward or backward pass with {KEY}=4" in said
    assert "That was in step 1. The run continues from where the run began" in said
    assert said.count(f"with {KEY}=1 and the same result; set that to make it permanent") == 1
    assert same(weights(fits / "global_step_2"), weights(halved / "global_step_2"))
    assert measured(fits) == measured(halved)
