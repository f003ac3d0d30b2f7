"""Training on several devices: the run of one device, and checkpoints without a number of devices."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.forked_group import ForkedGroup
from tests.runs.test_profiler import traced
from tests.runs.tiny_run import GAE, base_overrides, measured, train, weights, write_inputs
from tether.checkpoints import load_state
from tether.config import load_config
from tether.distributed import groups
from tether.loop.run import Run
from tether.metrics.loggers.jsonl import read_samples
from tether.text.build import build_run

KEY = "trainer.n_gpus_per_node"
FLOAT32 = [
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.rollout.dtype=float32",
    "critic.model.fsdp_config.dtype=float32",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def overrides(inputs: Path, folder: Path, devices: int, steps: int) -> list[str]:
    steady = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"
    length = [f"trainer.total_training_steps={steps}", "trainer.save_freq=1"]
    where = ["trainer.device=cpu", f"{KEY}={devices}"]
    return [*base_overrides(inputs, folder), *GAE, *FLOAT32, steady, *length, *where]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def saved_again(inputs: Path, folder: Path, devices: int, checkpoint: Path, more: Sequence[str] = ()) -> bool:
    """Whether a run that resumes on so many devices holds the bits of the checkpoint."""
    run = build_run(load_config(None, [*overrides(inputs, folder, devices, 10), *more]))
    try:
        return holds(run, folder / f"again_{devices}", checkpoint)
    finally:
        run.close()


def holds(run: Run, again: Path, checkpoint: Path) -> bool:
    """Whether a run has the bits of the checkpoint that it resumes from: it saves them again."""
    again.mkdir()
    for role, learner in (("actor", run.trainer.actor), ("critic", run.trainer.critic)):
        if learner is None:
            continue
        learner.engine.saving(again / role, again / f"{role}.pt", copy=False)()
        assert len(list((again / role).glob("*.safetensors"))) == run.loaded.config.trainer.n_gpus_per_node
        if not same(weights(again, role), weights(checkpoint, role)):
            return False
        if not same(load_state(again / f"{role}.pt"), load_state(checkpoint / "training" / f"{role}.pt")):
            return False
    return True


@pytest.mark.slow
def test_two_devices_train_as_one_and_resume_each_others_checkpoints(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ray; it resumes in other processes, which start sooner."""
    pytest.importorskip("ray")
    one = train(overrides(inputs, tmp_path / "one", 1, 3))
    two = train([*overrides(inputs, tmp_path / "two", 2, 2), "trainer.profile_steps=[2]"])
    assert {"actor.learn", "critic.infer", "sampler.generate"} <= traced(two / "profile/step_2/rank_1.json.gz")
    assert {"gen", "update_actor"} <= traced(two / "profile/step_2/loop.json.gz")
    expected, found = measured(one), measured(two)
    for step in (1, 2):
        assert found[step]["critic/score/mean"] == expected[step]["critic/score/mean"]
        more = found[step].keys() - expected[step].keys()
        assert {key.split("/")[0] for key in more} == {"global_seqlen", "transfer"}
        assert expected[step].keys() <= found[step].keys()
        assert 1 <= found[step]["global_seqlen/busiest_over_mean"] < 2
        whole = sum(value.nbytes for value in weights(two / "global_step_2").values())
        assert found[step]["transfer/weights_bytes"] == 2 * whole
        assert found[step]["transfer/rows_to_ranks_bytes"] > found[step]["transfer/rows_from_ranks_bytes"] > 0
        for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4)
    left, right = weights(one / "global_step_2"), weights(two / "global_step_2")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    assert saved_again(inputs, tmp_path / "two", 1, two / "global_step_2")
    resumed = train(overrides(inputs, tmp_path / "two", 2, 3))
    assert read_samples(resumed) == read_samples(one)
    assert measured(resumed)[3]["critic/score/mean"] == expected[3]["critic/score/mean"]
    assert saved_again(inputs, tmp_path / "one", 2, one / "global_step_3")


SHARED = [f"{role}.ulysses_sequence_parallel_size=2" for role in ("actor_rollout_ref.actor", "critic")]
PIECES = ["actor_rollout_ref.rollout.max_num_seqs=2"]
ADAPTERS = ["actor_rollout_ref.model.lora_rank=2", "critic.model.lora_rank=2", "algorithm.use_kl_in_reward=True"]
FULL_KL = ["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "on_devices"),
    [([], [*SHARED, *PIECES]), (ADAPTERS, []), (ADAPTERS, SHARED), (FULL_KL, SHARED), ([*ADAPTERS, *FULL_KL], [])],
    ids=[
        *("shared rows, prompts in pieces", "adapters", "adapters and shared rows"),
        *("full KL and shared rows", "full KL and adapters"),
    ],
)
def test_other_ways_to_share_train_as_one_device(
    both: list[str], on_devices: list[str], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    if ADAPTERS[0] in both:
        pytest.importorskip("peft")
    packed = ["critic.model.use_remove_padding=True", "actor_rollout_ref.actor.use_kl_loss=True", *both]
    one = train([*overrides(inputs, tmp_path / "one", 1, 3), *packed])
    for steps in (2, 3):  # the third from a checkpoint
        two = train([*overrides(inputs, tmp_path / "two", 2, steps), *packed, *on_devices])
    expected, found = measured(one), measured(two)
    for step in (1, 2, 3):
        assert found[step]["critic/score/mean"] == expected[step]["critic/score/mean"]
        compared = ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy", "actor/kl_loss")
        for name in (*compared, "actor/reward_kl_penalty"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-3, abs=1e-6)
    left, right = weights(one / "global_step_3"), weights(two / "global_step_3")
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=1e-3, atol=1e-3)


def test_without_ray_the_extra_is_named(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "tether.distributed.ray_group", raising=False)
    with pytest.raises(ValueError, match=rf"{KEY}=2: .* package ray, .*pip install .*\[ray\]'"):
        build_run(load_config(None, overrides(inputs, tmp_path, 2, 1)))


def test_more_devices_than_there_are_is_refused(inputs: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    given = [*overrides(inputs, tmp_path, 2, 1), "trainer.device=auto"]
    with pytest.raises(ValueError, match=rf"{KEY}=2: this machine has no CUDA device"):
        build_run(load_config(None, given))
