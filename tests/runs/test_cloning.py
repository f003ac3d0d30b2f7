"""From demonstrations to a run that starts from them, by the commands that a user types."""

import itertools
import json
import re

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

import torch  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from tests.control.envs import toys  # noqa: E402
from tests.runs.control_run import call  # noqa: E402
from tether.commands.cli import app  # noqa: E402
from tether.config import load_config  # noqa: E402
from tether.control.build import build_control_run  # noqa: E402
from tether.control.learning.rollouts import POLICY  # noqa: E402
from tether.control.policies.mlp_policy import load_policy  # noqa: E402
from tether.integrations.robots.lerobot import read_dataset, write_dataset  # noqa: E402

ENV = ["env.train.id=CartPole-v1", "policy.hidden_dim=32", "policy.normalize_observations=True"]
TEXT = ["data.train_files=a.jsonl", "actor_rollout_ref.model.path=m"]
EXPERT = """
def act(env, obs):
    position, speed, angle, turn = obs
    return int(angle + 0.5 * turn + 0.05 * position + 0.1 * speed > 0)

def lazy(env, obs):
    return 0

def wrong(env, obs):
    return [1, 2]
"""


@pytest.fixture(autouse=True)
def _toys():
    toys.register()


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """CartPole: ten episodes of a scripted expert, imitated."""
    folder = tmp_path_factory.mktemp("cloned")
    (folder / "expert.py").write_text(EXPERT)
    call("collect", *ENV, "--from", f"{folder / 'expert.py'}:act", "-o", folder / "demos", "-n", 10, "--seed", 5)
    shown = call(
        "bc", *ENV, "trainer.logger=file", "--data", folder / "demos", "-o", folder / "bc", "--epochs", 8, "--lr", 3e-3
    )
    assert "held-out loss: 0.69" in shown
    return folder


def run_overrides(folder, *more):
    return [
        *ENV, "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16", "trainer.logger=file",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.total_training_steps=1", "trainer.test_freq=-1",
        "trainer.val_before_train=False", f"trainer.default_local_dir={folder / 'run'}", *more,
    ]  # fmt: skip


def test_episodes_are_recorded_as_they_were_played(cloned):
    episodes = read_dataset(cloned / "demos")
    assert len(episodes) == 10
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=5 + 3)
    for t in range(len(episodes[3])):
        assert np.array_equal(episodes[3].observations["state"][t], obs)
        obs, *_ = env.step(int(episodes[3].actions[t, 0]))
    assert json.loads((cloned / "demos/meta/info.json").read_text())["robot_type"] == "CartPole-v1"


def test_the_clone_plays_well_and_a_run_starts_from_it(cloned, tmp_path):
    call("eval", cloned / "bc", "env.eval.num_episodes=20")
    (written,) = (cloned / "bc").glob("eval_*.json")
    assert json.loads(written.read_text())["metrics"]["eval/return"] > 300
    run = build_control_run(load_config(None, run_overrides(tmp_path, f"actor_rollout_ref.model.path={cloned / 'bc'}")))
    start = load_policy(next((cloned / "bc").glob("global_step_*")) / POLICY)
    assert all(
        torch.equal(a, b) for a, b in zip(run.trainer.rollouts.policy.parameters(), start.parameters(), strict=True)
    )
    assert float(run.trainer.rollouts.policy.normalizer.count) > 1000
    run.trainer.fit()
    run.close()
    statistics = start.normalizer.state_dict()  # learned weights would see something else where these move
    assert all(
        torch.equal(statistics[name], kept)
        for name, kept in run.trainer.rollouts.policy.normalizer.state_dict().items()
    )


def test_a_checkpoint_collects_too(cloned, tmp_path, monkeypatch):
    monkeypatch.setattr("tether.runtime.terminal.monotonic", itertools.count(0, 11).__next__)
    said = call("collect", *ENV, "--from", cloned / "bc", "-o", tmp_path / "demos", "-n", 2)
    assert said.startswith("2 episodes of CartPole-v1 to record\nrecorded:1/2 - eta:0:")
    said = call("eval", cloned / "bc", "env.eval.num_episodes=3")
    assert re.match(r"(loading .*/bc \.\.\..*\n)+evaluated in CartPole-v1 .*\n(played:\d/3( - eta:\S+)?\n)+", said)
    assert len(read_dataset(tmp_path / "demos")) == 2


def test_only_what_succeeds_is_kept(cloned, tmp_path):
    arguments = ["collect", "env.train.id=tether/Countdown-v0", "--from", f"{cloned / 'expert.py'}:lazy", "-n", 2]
    call(*arguments, "--successful", "-o", tmp_path / "demos")
    failing = [*arguments, "env.train.init_params.ends=1", "--successful", "-o", tmp_path / "none"]
    shown = CliRunner().invoke(app, [str(argument) for argument in failing])
    assert "0 of 40 episodes succeeded, but 2 are requested" in str(shown.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", *ENV, "--from", "{cloned}/expert.py:nobody"], "defines no function nobody(env, obs)"),
        (
            ["collect", *ENV, "--from", "{cloned}/expert.py:wrong", "-o", "{tmp}/d"],
            "an action of shape (2,) is none of",
        ),
        (["collect", *ENV, "--from", "{cloned}/nowhere"], "--from={cloned}/nowhere: no checkpoint here"),
        (["collect", *ENV, "--from", "scripted"], "env.train.env_type: gymnasium brings no scripted policies"),
        (["collect", *TEXT, "--from", "{cloned}/expert.py:act"], "env.train.id: name the simulator"),
        (
            ["collect", *ENV, "env.train.env_type=envpool", "--from", "{cloned}/expert.py:act"],
            "env.train.env_type: envpool makes no single environment",
        ),
        (["bc", *ENV, "--data", "{cloned}/nothing"], "{cloned}/nothing: no dataset of episodes here"),
        (
            ["bc", "env.train.id=Acrobot-v1", "--data", "{cloned}/demos"],
            "{cloned}/demos: not recorded in Acrobot-v1: state: (4,) here, but (6,) in the environment",
        ),
    ],
)
def test_bad_input(arguments, message, cloned, tmp_path):
    names = {"cloned": cloned, "tmp": tmp_path}
    shown = CliRunner().invoke(app, [argument.format(**names) for argument in arguments])
    assert type(shown.exception) is ValueError
    assert message.format(**names) in str(shown.exception)


def test_a_start_of_another_shape_is_refused(cloned, tmp_path):
    start = f"actor_rollout_ref.model.path={cloned / 'bc'}"
    with pytest.raises(ValueError, match=r"model\.path=.* its policy has hidden_dim=32, this run 16"):
        build_control_run(load_config(None, run_overrides(tmp_path, start, "policy.hidden_dim=16")))


def test_without_a_critic_or_with_another_the_policy_is_taken_alone(cloned, tmp_path):
    groups = ["algorithm.adv_estimator=grpo", "env.train.auto_reset=False", "env.train.group_size=2"]
    start = f"actor_rollout_ref.model.path={cloned / 'bc'}"
    run = build_control_run(load_config(None, run_overrides(tmp_path, start, *groups)))
    run.close()
    assert run.trainer.rollouts.policy.critic is None


def test_demonstrations_of_forbidden_choices_are_refused(tmp_path):
    (tmp_path / "legal.py").write_text(
        "import numpy as np\ndef act(env, obs):\n    return [np.flatnonzero(a)[-1] for a in env.unwrapped._allowed]\n"
    )
    masked = ["env.train.id=tether/Allowed-v0", "env.train.action_masks=True"]
    call("collect", *masked, "--from", f"{tmp_path / 'legal.py'}:act", "-o", tmp_path / "demos", "-n", 4)
    call("bc", *masked, "--data", tmp_path / "demos", "-o", tmp_path / "bc", "--epochs", 1)
    episodes = read_dataset(tmp_path / "demos")
    step, choice = next((t, a) for t, a in np.argwhere(episodes[2].observations["action_mask"][:, :4] == 0))
    episodes[2].actions[step, 0] = choice
    write_dataset(tmp_path / "wrong", episodes, fps=30, robot="toy")
    shown = CliRunner().invoke(app, ["bc", *masked, "--data", str(tmp_path / "wrong")])
    assert f"wrong: episode 2, step {step}: the action [{choice}, " in str(shown.exception)
    assert f"its action_mask forbids choice {choice}" in str(shown.exception)
