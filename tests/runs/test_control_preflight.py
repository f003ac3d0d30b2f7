"""The preflight of control policies names the cause; and what is refused before the first step, text and control."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tether
from tests.control.envs import toys
from tests.runs.loops import Control, Loop, Text, assert_same_run
from tests.runs.tiny_run import LIGHT
from tether.control.envs.protocol import ContinuousActions, DiscreteActions
from tether.control.learning.preflight import action_findings, observation_findings
from tether.loop.preflight import MemoryNeed, memory_findings

SPOILED = "env.train.wrappers=[tests.control.envs.spoiled:{}]"
CAUSES = {
    "observation_range": ([SPOILED.format("Large"), "policy.normalize_observations=False"], "observation state: "),
    "reward_range": (["env.train.wrappers=[tests.control.envs.stateful:Astronomic]"], "rewards reach 1e+38"),
    "zero_reward_variance": ([SPOILED.format("NeverRewards")], "all 64 rewards are 0: "),
    "episodes_end_at_once": ([SPOILED.format("EndsAtOnce")], "episodes ended after one step"),
    "actions_clipped": (["env.train.id=Pendulum-v1", "policy.init_logstd=3"], "Lower policy.init_logstd"),
    "clipping_inactive": (
        ["actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.actor.ppo_epochs=1"],
        "lower ppo_mini_batch_size",
    ),
}


def look(overrides):
    run = Control().build(overrides)
    try:
        return run.preflight()
    finally:
        run.close()


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_named(name: str, tmp_path: Path) -> None:
    more, message = CAUSES[name]
    found = look(Control().overrides(tmp_path, "actor_rollout_ref.actor.ppo_epochs=2", *more))
    assert [finding.cause for finding in found.findings] == [name]
    assert message in found.findings[0].message
    assert not found.refused


@pytest.mark.parametrize(
    "more",
    [
        ["env.train.id=Pendulum-v1"],
        ["policy.num_action_chunks=2"],
        ["env.train.auto_reset=False"],
        ["policy.lstm_dim=8"],
        pytest.param(["env.train.vectorization=subprocess", "env.train.num_workers=2"], marks=pytest.mark.slow),
    ],
)
def test_a_good_run_has_no_finding(more: list[str], tmp_path: Path) -> None:
    assert not look(Control().overrides(tmp_path, *more)).findings


def test_pictures_are_read_by_a_cnn_unless_a_perceptron_is_named_which_is_warned_about(tmp_path: Path) -> None:
    toys.register()
    spot = ["env.train.id=tether/Spot-v0", "policy.normalize_observations=False"]
    named = []
    for i, more in enumerate(([], ["policy.model_type=mlp_policy"])):
        findings = look(Control().overrides(tmp_path / str(i), *spot, *more)).findings
        named.append([finding.message for finding in findings if finding.cause == "pixels_as_numbers"])
    assert not named[0]
    assert "policy.model_type=cnn_policy" in named[1][0]


def test_limits_are_as_documented() -> None:
    """Two of four numbers are outside of [-1, 1]; 100 is not too large."""
    actions, box = np.array([[0.5, 2.0], [-3.0, 1.0]]), ContinuousActions(2, (-1.0, -1.0), (1.0, 1.0))
    assert [finding.cause for finding in action_findings(actions, box)] == ["actions_clipped"]
    assert not list(action_findings(actions[:, :1] / 4, ContinuousActions(1, (-1.0,), (1.0,))))
    assert not list(action_findings(actions, DiscreteActions((2, 2))))
    assert not list(observation_findings({"state": np.array([[-100.0]]), "image": np.array([[255]], dtype=np.uint8)}))
    assert len(list(observation_findings({"state": np.array([[-101.0]])}))) == 1


def test_looking_changes_nothing_in_the_run(tmp_path: Path) -> None:
    """Not even in environments that keep state over a reset, or draw from the global generators."""
    control = Control()
    wrappers = "env.train.wrappers=[tests.control.envs.stateful:OwnGenerators,tests.control.envs.stateful:DrawsNumpy]"
    for folder, before in (("without", lambda run: None), ("with", lambda run: run.preflight())):
        more = [wrappers, "env.train.vectorization=sync", "trainer.total_training_steps=2"]
        control.train(control.overrides(tmp_path / folder, *more), before=before)
    assert_same_run(tmp_path / "without", tmp_path / "with", 2)


@pytest.fixture(params=["text", "control"])
def loop(request: pytest.FixtureRequest, inputs: Path) -> Loop:
    return Text(inputs, *LIGHT) if request.param == "text" else Control()


def test_a_step_that_cannot_fit_is_refused_before_it(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tether.loop.preflight.available_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"preflight refuses the run"):
        tether.train(overrides=loop.overrides(tmp_path))
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "refused: the first step needs" in said
    assert "0.00 GiB are free" in said
    assert not list(tmp_path.glob("global_step_*"))


def test_a_folder_that_cannot_be_written_is_one_error(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"trainer\.default_local_dir=.*file is a file"):
        tether.train(overrides=loop.overrides(tmp_path / "file" / "run"))


def test_memory_is_counted_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 + 2 GiB do not fit into 3 GiB on one device, and do on two."""
    monkeypatch.setattr("tether.loop.preflight.available_memory", lambda device: 3 * 2**30)
    cpu, other = torch.device("cpu"), torch.device("cuda")
    (found,) = memory_findings([MemoryNeed("one", cpu, 2 * 2**30), MemoryNeed("two", cpu, 2 * 2**30)])
    assert found.refuses
    assert "needs 4.00 GiB more on cpu (one 2.00 GiB, two 2.00 GiB), where 3.00 GiB are free" in found.message
    assert not memory_findings([MemoryNeed("one", cpu, 2 * 2**30), MemoryNeed("two", other, 2 * 2**30)])


def test_gradients_and_moments_are_counted_once(inputs: Path, tmp_path: Path) -> None:
    """12 bytes of each number that trains, however often its name occurs; a LoRA run trains few."""
    from tether.loop.preflight import _optimizer_needs

    run = Text(inputs).build(Text(inputs).overrides(tmp_path))
    try:
        model = run.trainer.actor.engine.model
        (need,) = _optimizer_needs(run.trainer.actor)
        assert need.bytes == 12 * sum(weight.numel() for weight in model.parameters())
        model.requires_grad_(False)
        assert not _optimizer_needs(run.trainer.actor)
    finally:
        run.close()
