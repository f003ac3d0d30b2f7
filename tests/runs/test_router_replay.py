"""Runs whose updates choose the experts of an earlier pass: R2 that of the old log-probs, R3 the sampler's."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from tests.runs.forked_group import ForkedGroup
from tests.runs.steps import Stepped, first_step, stepped
from tests.runs.tiny_run import LIGHT, measured, same, train, weights
from tests.tiny import save_tiny
from tether.config import load_config
from tether.distributed import groups
from tether.text.build import build_run

pytestmark = pytest.mark.slow

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODES = {
    "disabled": [],
    "R2": [f"{ACTOR}.router_replay.mode=R2"],
    "R3": [f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"],
}
KL = "rollout_corr/k3_kl"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with experts."""
    return save_tiny(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_experts=16)


@pytest.fixture
def overrides(base: list[str], mixture: Path) -> list[str]:
    """Return overrides of a run of one update with each rollout, in float32."""
    return [
        *base,
        *LIGHT,
        f"actor_rollout_ref.model.path={mixture}",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=4",
        f"{ACTOR}.optim.lr_scheduler_type=constant",
        f"{ACTOR}.ppo_mini_batch_size=4",
    ]


def moved(one: Stepped, other: Stepped) -> float:
    """Return how far the weights of two runs are apart, at the worst number."""
    left, right = (run.trainer.actor.engine.model.state_dict() for run in (one, other))
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_where_nothing_flips_replay_changes_nothing(overrides: list[str]) -> None:
    """The same experts, and the same step up to the order of a sum."""
    plain = stepped(overrides)
    for mode in ("R2", "R3"):
        replayed = stepped([*overrides, *MODES[mode]])
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert replayed.metrics[0][name] == pytest.approx(plain.metrics[0][name], rel=1e-4, abs=1e-6)
        assert abs(replayed.metrics[0][KL]) < 1e-6
        assert moved(replayed, plain) < 1e-4


def test_the_choice_of_the_old_policy_outlasts_an_update(overrides: list[str]) -> None:
    """Four updates with each rollout: in the later ones other experts would be chosen."""
    often = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2")
    runs = {mode: stepped([*overrides, *often, *more]) for mode, more in MODES.items()}
    assert moved(runs["R2"], runs["disabled"]) > 1e-3
    for mode in ("R2", "R3"):
        assert runs[mode].metrics[0]["actor/first_update/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert runs[mode].metrics[0][KL] == pytest.approx(runs["disabled"].metrics[0][KL], abs=1e-6)


def test_the_samplers_choice_brings_its_log_probs_nearer(overrides: list[str]) -> None:
    """It samples in bfloat16, and the policy is trained in float32."""
    often = (f"{ROLLOUT}.dtype=bfloat16", f"{ACTOR}.ppo_epochs=2")
    found = {mode: first_step([*overrides, *often, *more])[KL] for mode, more in MODES.items()}
    assert found["R2"] == found["disabled"]
    assert 0 < found["R3"] < found["disabled"] / 2


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_resumed_run_is_the_uninterrupted_one(mode: str, overrides: list[str], tmp_path: Path) -> None:
    options = [*overrides, *MODES[mode], f"{ACTOR}.ppo_epochs=2", "trainer.total_training_steps=2"]
    whole = train([*options, "trainer.save_freq=1"])
    shutil.copytree(whole / "global_step_1", tmp_path / "parts" / "global_step_1")
    parts = train([*options, "trainer.save_freq=2", f"trainer.default_local_dir={tmp_path / 'parts'}"])
    assert same(weights(whole / "global_step_2"), weights(parts / "global_step_2"))
    assert measured(parts)[2] == measured(whole)[2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_devices_replay_as_one(
    strategy: str, mode: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices that share the experts, or the weights; the sampler works in bfloat16, so that choices differ."""
    if strategy == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core: pip install 'tether[megatron]'")
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    often = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.dtype=bfloat16", "trainer.total_training_steps=1")
    two = ["trainer.n_gpus_per_node=2", f"{ACTOR}.strategy={strategy}"]
    if strategy == "megatron":
        two.append(f"{ACTOR}.megatron.expert_model_parallel_size=2")
    one, other = (
        measured(train([*overrides, *MODES[mode], *often, *more, f"trainer.default_local_dir={tmp_path / name}"]))[1]
        for name, more in (("one", []), ("two", two))
    )
    assert other["critic/score/mean"] == one["critic/score/mean"]
    for name in (KL, "actor/grad_norm", "actor/entropy"):
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_model_without_experts_is_refused(mode: str, overrides: list[str], inputs: Path) -> None:
    dense = f"actor_rollout_ref.model.path={inputs / 'model'}"
    with pytest.raises(ValueError, match=rf"{ACTOR}\.router_replay\.mode={mode}: LlamaConfig .* has no experts"):
        build_run(load_config(None, [*overrides, *MODES[mode], dense]))


def test_experts_that_nobody_chose_are_noticed(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the first test."""
    from tether.text.sampling.expert_recorder import ExpertRecorder

    result = ExpertRecorder.result
    monkeypatch.setattr(ExpertRecorder, "result", lambda recorder, width: turned(result(recorder, width)))
    assert first_step([*overrides, *MODES["R3"], f"{ACTOR}.ppo_epochs=2"])[KL] > 1e-2


def turned(experts: torch.Tensor) -> torch.Tensor:
    """Return each token's experts, one further each."""
    return torch.where(experts >= 0, (experts + 1) % 16, experts)
