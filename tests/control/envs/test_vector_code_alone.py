"""Ids that are registered with vector code and without single environments."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import tether
from tether.commands.model import export
from tether.config import load_config
from tether.control.envs.make import EnvOptions, ObservationOptions, ResetPolicy, make_vector_env

ID = "tests/VectorAlone-v0"
SPACES = gymnasium.spaces.Box(0, 10, (1,), np.float32), gymnasium.spaces.Box(-1, 1, (2,), np.float32)


class Fours(VectorEnv):
    """Always four environments, whose episodes have five steps."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 4, scale: float = 1.0) -> None:
        self.num_envs, self.scale = 4, scale
        self.single_observation_space, self.single_action_space = SPACES
        self.observation_space, self.action_space = (batch_space(space, 4) for space in SPACES)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = np.zeros(4, dtype=np.int64)
        return self.t[:, None].astype(np.float32), {}

    def step(self, actions: Any) -> Any:
        self.t = np.where(self.t == 5, 0, self.t + 1)
        never = np.zeros(4, dtype=np.bool_)
        return self.t[:, None].astype(np.float32), self.scale * self.t, self.t == 5, never, {}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    gymnasium.register(ID, vector_entry_point=Fours)
    yield
    del gymnasium.registry[ID]


def test_a_run_makes_them_together_from_beginning_to_end(tmp_path: Path) -> None:
    """Defaults of continuous actions, the preflight, a test, what is loaded; there is no single one to play with."""
    overrides = {
        "env.train.id": ID, "env.train.total_num_envs": 4, "env.eval.total_num_envs": 4, "env.eval.num_episodes": 4,
        "env.train.max_steps_per_rollout_epoch": 16, "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "trainer.total_training_steps": 1, "trainer.test_freq": 1, "trainer.logger": "file",
        "trainer.default_local_dir": str(tmp_path / "run"),
    }  # fmt: skip
    run = tether.train(overrides=overrides)
    assert run.metrics[-1]["eval/return"] == 15
    policy = tether.load(run.folder)
    assert policy.predict(np.zeros(1, np.float32)).shape == (2,)
    with pytest.raises(ValueError, match=rf"env\.eval\.id: {ID} has vector code alone, so it makes no single"):
        policy.make_env()
    assert load_config(run.checkpoint / "run.yaml", []).config.policy.normalize_observations  # of continuous actions


def test_a_policy_of_envpool_is_loaded_and_exported_without_envpool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("envpool")
    overrides = {
        "env.train.id": "CartPole-v1", "env.train.env_type": "envpool", "env.train.total_num_envs": 4,
        "env.train.max_steps_per_rollout_epoch": 16, "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "trainer.total_training_steps": 1, "trainer.test_freq": -1, "trainer.logger": "file",
        "trainer.default_local_dir": str(tmp_path / "run"),
    }  # fmt: skip
    run = tether.train(overrides=overrides)
    monkeypatch.setitem(sys.modules, "envpool", None)  # as where it is not installed
    policy = tether.load(run.folder)
    assert policy.predict(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(ValueError, match=r"observation: shape \(5,\); give \(4,\), or"):
        policy.predict(np.zeros(5, np.float32))
    export(run.folder, "npz", tmp_path / "policy.npz")
    exported = np.load(tmp_path / "policy.npz")
    assert exported["output.weight"].shape[0] == 2
    with pytest.raises(ValueError, match=r"--out=.*policy\.npz: exists already"):
        export(run.folder, "npz", tmp_path / "policy.npz")
    with pytest.raises(ValueError, match=r"--to=onyx: give one of openvla, npz, onnx\. Did you mean onnx"):
        export(run.folder, "onyx", tmp_path / "policy.onnx")
    assert policy.predict(np.zeros((3, 4), np.float32)).shape == (3,)
    with pytest.raises(ValueError, match=r"env\.eval\.env_type: envpool makes no single environment\."):
        policy.make_env()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"vectorization": "subprocess"}, r"env\.train\.vectorization=subprocess\."),
        ({"vectorization": "sync"}, r"env\.train\.vectorization=sync\."),
        ({"wrappers": ("gymnasium.wrappers:RescaleReward",)}, r"env\.train\.wrappers\."),
        (
            {"ignore_terminations": True, "view": ObservationOptions(frame_stack=2)},
            r"ignore_terminations and .*frame_stack",
        ),
        ({"reset_policy": ResetPolicy(group_size=2)}, r"group_size"),
    ],
)
def test_what_needs_single_environments_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"env\.train\.id: {ID} has vector code alone, .*{named}"):
        make_vector_env(EnvOptions(ID, 4, **more))
    with pytest.raises(ValueError, match=r"total_num_envs: 3, .* always makes 4"):
        make_vector_env(EnvOptions(ID, 3))
