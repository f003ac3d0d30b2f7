"""Runs whose updates choose the experts of an earlier pass: R2 that of the old log-probs, R3 the sampler's."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny
from tests.trainer.forked_group import ForkedGroup
from tests.trainer.tiny_run import base_overrides, measured, train, weights, write_inputs
from tether.assembly import groups
from tether.assembly.run import build_run
from tether.config import load_config

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODES = {
    "disabled": [],
    "R2": [f"{ACTOR}.router_replay.mode=R2"],
    "R3": [f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"],
}
KL = "rollout_corr/k3_kl"
STEPS = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    save_tiny(folder / "mixture", "qwen3_moe", num_hidden_layers=4, num_experts=16)
    return folder


def overrides(inputs: Path, folder: Path, mode: str, *more: str, steps: int = STEPS) -> list[str]:
    return [
        *base_overrides(inputs, folder),
        f"actor_rollout_ref.model.path={inputs / 'mixture'}",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=4",
        f"{ACTOR}.optim.lr_scheduler_type=constant",
        f"{ACTOR}.ppo_mini_batch_size=4",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={steps}",
        *MODES[mode],
        *more,
    ]


def moved(folder: Path, other: Path) -> float:
    """How far the weights of two runs are apart, at the worst number."""
    left, right = (weights(run / f"global_step_{STEPS}") for run in (folder, other))
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_where_nothing_flips_replay_changes_nothing(inputs: Path, tmp_path: Path) -> None:
    """One update with each rollout, in float32: the same experts, and the same run up to the order of a sum."""
    runs = {mode: train(overrides(inputs, tmp_path / mode, mode)) for mode in MODES}
    plain = measured(runs["disabled"])
    for mode in ("R2", "R3"):
        for step in range(1, STEPS + 1):
            for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
                assert measured(runs[mode])[step][name] == pytest.approx(plain[step][name], rel=1e-4, abs=1e-6)
            assert abs(measured(runs[mode])[step][KL]) < 1e-6
        assert moved(runs[mode], runs["disabled"]) < 1e-4


def test_the_choice_of_the_old_policy_outlasts_an_update(inputs: Path, tmp_path: Path) -> None:
    """Four updates with each rollout: in the later ones other experts would be chosen."""
    often = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2")
    runs = {mode: train(overrides(inputs, tmp_path / mode, mode, *often)) for mode in ("disabled", "R2", "R3")}
    assert moved(runs["R2"], runs["disabled"]) > 1e-3
    first = [measured(run)[1] for run in runs.values()]
    for found in first[1:]:
        assert found["actor/first_update/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert found[KL] == pytest.approx(first[0][KL], abs=1e-6)


def test_the_samplers_choice_brings_its_log_probs_nearer(inputs: Path, tmp_path: Path) -> None:
    """It samples in bfloat16, and the policy is trained in float32."""
    narrow = f"{ROLLOUT}.dtype=bfloat16"
    recomputed = f"{ACTOR}.ppo_epochs=2"
    found = {
        mode: measured(train(overrides(inputs, tmp_path / mode, mode, narrow, recomputed, steps=1)))[1][KL]
        for mode in MODES
    }
    assert found["R2"] == found["disabled"]
    assert 0 < found["R3"] < found["disabled"] / 2


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_resumed_run_is_the_uninterrupted_one(mode: str, inputs: Path, tmp_path: Path) -> None:
    often = f"{ACTOR}.ppo_epochs=2"
    whole = train(overrides(inputs, tmp_path / "whole", mode, often))
    train(overrides(inputs, tmp_path / "parts", mode, often, steps=1))
    parts = train(overrides(inputs, tmp_path / "parts", mode, often))
    assert moved(whole, parts) == 0.0
    assert measured(parts)[STEPS] == measured(whole)[STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_devices_replay_as_one(
    strategy: str, mode: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices that share the experts, or the weights; the sampler works in bfloat16, so that choices differ."""
    if strategy == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core: pip install 'tether[megatron]'")
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    often = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.dtype=bfloat16")
    two = ["trainer.n_gpus_per_node=2", f"{ACTOR}.strategy={strategy}"]
    if strategy == "megatron":
        two.append(f"{ACTOR}.megatron.expert_model_parallel_size=2")
    one, other = (
        measured(train(overrides(inputs, tmp_path / name, mode, *often, *more, steps=1)))[1]
        for name, more in (("one", []), ("two", two))
    )
    assert other["critic/score/mean"] == one["critic/score/mean"]
    for name in (KL, "actor/grad_norm", "actor/entropy"):
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_model_without_experts_is_refused(mode: str, inputs: Path, tmp_path: Path) -> None:
    dense = f"actor_rollout_ref.model.path={inputs / 'model'}"
    with pytest.raises(ValueError, match=rf"{ACTOR}\.router_replay\.mode={mode}: LlamaConfig .* has no experts"):
        build_run(load_config(None, overrides(inputs, tmp_path, mode, dense)))


def test_log_probs_of_weights_that_moved_are_noticed(inputs: Path, tmp_path: Path) -> None:
    """The negative control of the first test: replay of experts that nobody chose."""
    from tether.rollout.native.expert_recorder import ExpertRecorder

    found = []
    result = ExpertRecorder.result
    for wrong in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if wrong:
                patch.setattr(ExpertRecorder, "result", lambda recorder, width: turned(result(recorder, width)))
            run = train(overrides(inputs, tmp_path / str(wrong), "R3", f"{ACTOR}.ppo_epochs=2", steps=1))
            found.append(measured(run)[1][KL])
    assert abs(found[0]) < 1e-6 < 1e-2 < found[1]


def turned(experts: torch.Tensor) -> torch.Tensor:
    """Each token's experts by one further."""
    return torch.where(experts >= 0, (experts + 1) % 16, experts)
