"""An environment that breaks in the middle of a run: one error with its name and step, and the checkpoint stays."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from tether.checkpoints.store import TRACKER
from tether.commands.cli import main

BREAKS = """
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Breaks(VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs, how):
        self.num_envs, self.how, self.steps = num_envs, how, 0
        self.single_observation_space = gymnasium.spaces.Dict(
            action_mask=gymnasium.spaces.MultiBinary(2), x=gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        )
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def seen(self):
        return {
            "action_mask": np.ones((self.num_envs, 2), np.int8),
            "x": np.full((self.num_envs, 1), self.steps / 100, np.float32),
        }

    def reset(self, *, seed=None, options=None):
        return self.seen(), {}

    def step(self, actions):
        self.steps += 1
        obs, reward, never = self.seen(), np.ones(self.num_envs), np.zeros(self.num_envs, np.bool_)
        ended = never
        if self.steps >= 20:
            match self.how:
                case "width":
                    obs["x"] = np.zeros((self.num_envs, 2), np.float32)
                case "number":
                    obs["x"] = obs["x"][1:]
                case "device":
                    obs["x"] = torch.zeros(self.num_envs, 1, device="meta")
                case "dtype":
                    reward = reward.astype("U3")
                case "mask":
                    obs["action_mask"][1] = 0
                case "resets":
                    ended = ~never
                case "dies":
                    raise RuntimeError("the simulator died")
        return obs, reward, ended, never, {}
"""


@pytest.mark.parametrize(
    ("how", "message", "step"),
    [
        ("width", "x has the shape (4, 2), not (4, 1)", 20),
        ("number", "x has the shape (3, 1), not (4, 1)", 20),
        ("device", "are not 4 rows of Dict", 20),
        ("dtype", "the reward is array(['1.0',", 20),
        ("mask", "action_mask allows none of the alternatives of a choice in environment 1", 20),
        ("resets", "environment 0 ends again in the step that resets it", 21),
        ("dies", "RuntimeError: the simulator died", 20),
    ],
)
def test_one_error_and_the_checkpoint_stays(
    how: str,
    message: str,
    step: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.py").write_text(BREAKS)
    overrides = [
        f"env.train.id={tmp_path}/mine.py:Breaks", f"env.train.init_params.how={how}", "env.train.total_num_envs=4",
        "env.train.max_steps_per_rollout_epoch=8", "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "policy.hidden_dim=8", "trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.test_freq=-1",
        "trainer.val_before_train=false", "trainer.logger=file", f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["tether", "train", *overrides])
    monkeypatch.delenv("TETHER_HUGE_PAGES", raising=False)  # with it `train` re-executes the process
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == (1 if how == "dies" else 2)
    assert ("Traceback" in error) == (how == "dies")
    assert message in error
    assert f"{tmp_path}/mine.py:Breaks" in error
    assert f"at step {step}" in error
    assert (tmp_path / "run" / TRACKER).read_text() == "2"
