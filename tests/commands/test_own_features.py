"""A features extractor of one's own: ``policy.features_extractor=FILE.py:NAME``, in front of the hidden layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

import tether
from tests.control.envs import toys
from tests.runs.control_run import assert_resume_is_exact
from tests.runs.loops import Control
from tether.config import ConfigError, load_config
from tether.text.input_checks import missing_inputs

ACTOR = "actor_rollout_ref.actor"
MINE = '''
import torch
from torch import nn


class Features(nn.Module):
    """The picture laid out, beside the number."""

    def __init__(self, shapes, activation):
        super().__init__()
        assert activation == "relu", activation
        assert shapes == {"shift": (3,), "picture": (3, 5, 5)}, shapes
        self.see = nn.Linear(75, 24)

    def forward(self, parts):
        assert parts["picture"].dtype == torch.uint8
        seen = self.see(parts["picture"].flatten(1).float() / 255)
        return torch.cat([torch.relu(seen), parts["shift"]], dim=1)


class OfNumbers(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        ((self.name, (width,)),) = shapes.items()
        self.layer = nn.Linear(width, 3)

    def forward(self, parts):
        return self.layer(parts[self.name])


class Flat(OfNumbers):
    def forward(self, parts):
        return super().forward(parts).sum(dim=1)


class Infinite(OfNumbers):
    def forward(self, parts):
        return super().forward(parts) / 0


class Other(OfNumbers):
    def __init__(self, observation_space):
        super().__init__({})


def number(shapes):
    return 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    toys.register()
    return path


def on_cart_pole(folder: Path, *more: str) -> list[str]:
    return Control().overrides(folder, *more)


@pytest.mark.parametrize(("steps", "score"), [(1, 0.0), pytest.param(30, 0.75, marks=pytest.mark.slow)])
def test_it_reads_pictures_and_numbers(steps: int, score: float, file: Path, tmp_path: Path) -> None:
    """The column of a bright spot, shifted by a number beside the picture: without either 1/3 is the most."""
    run = tether.train(
        overrides=[
            "env.train.id=tether/Spot-v0", "env.train.init_params.shift=True", "policy.model_type=cnn_policy",
            f"policy.features_extractor={file}:Features", "policy.hidden_dim=64", "env.train.total_num_envs=16",
            "env.train.max_steps_per_rollout_epoch=24", "algorithm.gamma=0", f"{ACTOR}.ppo_mini_batch_size=96",
            f"{ACTOR}.optim.lr=1e-2", f"{ACTOR}.entropy_coeff=0", "env.eval.num_episodes=200",
            f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", f"trainer.save_freq={steps}",
            "trainer.logger=file", f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
    )  # fmt: skip
    assert run.last_score is not None
    assert run.last_score > score
    policy = tether.load(run.folder)
    env = policy.make_env()
    assert env.action_space.contains(policy.predict(env.reset(seed=0)[0]))


@pytest.mark.parametrize("memory", [[], ["policy.lstm_dim=4"], ["policy.share_critic=True", "policy.use_sde=True"]])
def test_resuming_is_exact(memory: list[str], file: Path, tmp_path: Path) -> None:
    named = [f"policy.features_extractor={file}:OfNumbers", "policy.normalize_observations=True", *memory]
    named += ["env.train.id=Pendulum-v1"] if "policy.use_sde=True" in memory else []
    named += ["trainer.total_training_steps=2", "trainer.test_freq=-1"]
    assert_resume_is_exact(tmp_path, Control().overrides(tmp_path, *named), total=2)


def test_actor_and_critic_have_one_each_unless_they_share(file: Path, tmp_path: Path) -> None:
    def policy(name: str, *more: str) -> Any:
        configured = [f"policy.features_extractor={file}:OfNumbers", *more]
        run = Control().build(on_cart_pole(tmp_path / name, *configured))
        run.close()
        return run.trainer.rollouts.policy

    one, other, shared = policy("one"), policy("other"), policy("shared", "policy.share_critic=True")
    weight = one.torso.own.module.layer.weight
    assert torch.equal(weight, other.torso.own.module.layer.weight)
    assert not torch.equal(weight, one.critic_torso.own.module.layer.weight)
    assert shared.critic_torso is None
    assert one.inputs({"state": torch.from_numpy(np.zeros((2, 4), dtype=np.float32))}).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Flat", r"a call on 4 observations of \{'state': \(4,\)\} returned \[4\]; expected features \[4, any width\]"),
        ("Infinite", ".*returned a number that is not finite"),
        ("Other", r"takes \(observation_space\); expected \(shapes\) and any of hidden_dim, num_layers, activation"),
        ("number", r"returns int; expected a torch\.nn\.Module"),
    ],
)
def test_what_gives_no_features_is_refused(file: Path, name: str, message: str, tmp_path: Path) -> None:
    configured = on_cart_pole(tmp_path / "run", f"policy.features_extractor={file}:{name}")
    with pytest.raises(ValueError, match=rf"policy\.features_extractor={file}:{name}: {message}"):
        tether.train(overrides=configured)


def test_mistakes_are_found_with_the_configuration(file: Path, tmp_path: Path) -> None:
    def configured(*more: str) -> list[str]:
        return on_cart_pole(tmp_path / "run", *more)

    (problem,) = missing_inputs(load_config(None, configured(f"policy.features_extractor={file}:OfNumber")).config)
    assert (problem.path, "Did you mean OfNumbers?" in problem.what) == ("policy.features_extractor", True)
    named = f"policy.features_extractor={file}:OfNumbers"
    with pytest.raises(ConfigError, match=r"policy\.cnn_type: nature, but policy\.features_extractor reads"):
        load_config(None, configured(named, "policy.model_type=cnn_policy", "policy.cnn_type=nature"))
    notes = load_config(None, configured(named, f"policy.model_type={file}:OfNumbers")).notes
    assert any("policy.features_extractor" in note for note in notes)
