"""Control on several devices: simulators and learners in other processes give what one process gives."""

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium")

import gymnasium

from tests.runs.forked_group import ForkedGroup
from tests.runs.tiny_run import measured, same, weights
from tether.checkpoints import load_state
from tether.commands.train import train
from tether.config import load_config
from tether.control.build import build_control_run
from tether.distributed import groups
from tether.runtime.objects import register_objects

DEVICES = "trainer.n_gpus_per_node"
COMMON = [
    "env.train.total_num_envs=6", "env.train.max_steps_per_rollout_epoch=32", "policy.hidden_dim=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=48", "actor_rollout_ref.actor.ppo_epochs=2", "trainer.save_freq=1",
    "trainer.device=cpu", "trainer.logger=[file]", "trainer.log_freq=1", "trainer.preflight=False",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
]  # fmt: skip
TESTED = ["env.eval.num_episodes=4", "env.eval.total_num_envs=2", "trainer.test_freq=2"]
CARTPOLE = ["env.train.id=CartPole-v1", "env.train.vectorization=sync", *TESTED]
PENDULUM = [
    "env.train.id=Pendulum-v1", "env.train.vectorization=subprocess", "env.train.num_workers=2", *TESTED,
    "env.train.max_episode_steps=32", "env.eval.max_episode_steps=32", "env.train.auto_reset=False",
    "algorithm.adv_estimator=grpo", "env.train.group_size=3", "policy.num_action_chunks=2",
    "policy.normalize_observations=True",
]  # fmt: skip
DIES = '''
"""A simulator that ends its process once."""

import os
import signal
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv

DIED = Path(__file__).parent / "one_has_died"


class Dies(CartPoleEnv):
    """After so many steps of all of them in a process, unless one did before."""

    steps = 0

    def step(self, action):
        Dies.steps += 1
        if Dies.steps == 120 and not DIED.exists():
            DIED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
'''


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)


def run(folder: Path, devices: int, steps: int, *more: str) -> Path:
    length = [f"{DEVICES}={devices}", f"trainer.total_training_steps={steps}"]
    return train(load_config(None, [*COMMON, *length, f"trainer.default_local_dir={folder}", *more])).folder


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "task",
    [pytest.param(CARTPOLE, id="cartpole"), pytest.param(PENDULUM, id="groups of pendulums", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("_forked")
def test_two_devices_train_as_one_and_resume_each_others_checkpoints(
    task: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = run(tmp_path / "one", 1, 2, *task), run(tmp_path / "two", 2, 2, *task)
    expected, found = measured(one), measured(two)
    assert found.keys() == expected.keys()
    sampled = {name: value for name, value in expected[1].items() if name.startswith(("env/", "critic/rewards"))}
    # The last bits of a network's outputs depend on how many rows a matrix product has, on most processors.
    assert {name: found[1][name] for name in sampled} == pytest.approx(sampled, rel=1e-6)
    for step in (1, 2):
        assert {name.split("/")[0] for name in found[step].keys() - expected[step].keys()} == {"transfer"}
        assert expected[step].keys() <= found[step].keys()
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "actor/lr", "env/return"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-3, abs=1e-5)
    close(weights(two / "global_step_2"), weights(one / "global_step_2"))
    kept = [sorted(file.name for file in (of / "global_step_2").rglob("*")) for of in (one, two)]
    assert kept[0] == kept[1]
    for folder, devices in ((two, 1), (one, 2)):  # the weights and the optimizer of the other number of devices
        where = [f"{DEVICES}={devices}", f"trainer.default_local_dir={folder}", "trainer.total_training_steps=3"]
        resumed = build_control_run(load_config(None, [*COMMON, *task, *where]))
        try:
            assert f"(saved on {3 - devices} devices, now {devices}); new episodes begin" in caplog.text
            again = tmp_path / f"again_{devices}"
            again.mkdir()
            resumed.trainer.actor.engine.saving(again / "actor", again / "actor.pt", copy=False)()
            assert same(weights(again), weights(folder / "global_step_2"))
            assert same(load_state(again / "actor.pt"), load_state(folder / "global_step_2/training/actor.pt"))
        finally:
            resumed.close()


@pytest.mark.usefixtures("_forked")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = run(tmp_path / "whole", 2, 3, *CARTPOLE), tmp_path / "parts"
    run(parts, 2, 2, *CARTPOLE)
    run(parts, 2, 3, *CARTPOLE)
    assert same(weights(parts / "global_step_3"), weights(whole / "global_step_3"))
    assert measured(parts)[3] == measured(whole)[3]


def dying(folder: Path, vectorization: str) -> list[str]:
    (folder / "dies.py").write_text(DIES)
    return [f"env.train.id={folder / 'dies.py'}:Dies", f"env.train.vectorization={vectorization}",
            "env.train.max_episode_steps=50", "trainer.test_freq=-1", "trainer.val_before_train=False"]  # fmt: skip


@pytest.mark.usefixtures("_forked")
def test_a_simulator_that_dies_in_its_process_is_replaced_and_said(tmp_path: Path) -> None:
    with pytest.warns(
        RuntimeWarning, match="the process of environments [03] to [25] was killed by SIGKILL.* is replaced"
    ):
        folder = run(tmp_path / "run", 2, 3, *dying(tmp_path, "subprocess"), "env.train.num_workers=2")
    assert measured(folder).keys() == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_simulator_that_ends_its_device_costs_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By Ray: the run begins again at its last checkpoint."""
    task = dying(tmp_path, "sync")
    died = run(tmp_path / "died", 2, 3, *task)
    assert "Restart 1 of 3 (trainer.max_restarts)" in capsys.readouterr().out
    undisturbed = run(tmp_path / "undisturbed", 2, 3, *task)
    assert "Restart" not in capsys.readouterr().out
    assert same(weights(died / "global_step_3"), weights(undisturbed / "global_step_3"))
    assert measured(died)[3] == measured(undisturbed)[3]


def test_an_object_of_this_process_is_refused(tmp_path: Path) -> None:
    where = [f"{DEVICES}=2", f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=1"]
    loaded = load_config(None, [*COMMON, "env.train.id=object:env", "env.train.vectorization=sync", *where])
    with (
        register_objects({"env": partial(gymnasium.make, "CartPole-v1")}),
        pytest.raises(ValueError, match=r"^env\.train\.id: an object of this process"),
    ):
        build_control_run(loaded)
