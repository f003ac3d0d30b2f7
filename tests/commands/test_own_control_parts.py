"""An environment and a network of one's own: ``FILE.py:NAME`` in the configuration, or an object."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

import tether  # noqa: E402
from tests.runs.control_run import assert_resume_is_exact  # noqa: E402
from tests.runs.loops import Control, contents  # noqa: E402
from tests.runs.tiny_run import same  # noqa: E402
from tether.config import ConfigError, load_config  # noqa: E402
from tether.control.envs.make import EnvOptions, make_vector_env  # noqa: E402
from tether.runtime.user_files import definition  # noqa: E402
from tether.text.input_checks import missing_inputs  # noqa: E402

MINE = '''
import gymnasium
import numpy as np
import torch
from torch import nn


class Corridor(gymnasium.Env):
    """A place on a line: going right is rewarded, and an episode has eight steps."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=8, **other):
        assert not other, other
        self.length = length

    def _seen(self):
        return np.array([self.place, self.time / self.length], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = 0, 0
        return self._seen(), {}

    def step(self, action):
        self.place += 2 * int(action) - 1
        self.time += 1
        return self._seen(), float(action), False, self.time == self.length, {}


def corridor(length=8):
    return Corridor(length)


class OldStep(Corridor):
    def step(self, action):
        return self._seen(), 0.0, False, {}


class NoInfo(Corridor):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0]


class PaysNothing(Corridor):
    def step(self, action):
        return self._seen(), None, False, False, {}


class PaysArrays(Corridor):
    def step(self, action):
        return self._seen(), np.array([1.0]), False, False, {}


class EndsInWords(Corridor):
    def step(self, action):
        return self._seen(), 0.0, "no", False, {}


class Outside(Corridor):
    def _seen(self):
        return np.zeros(3)


class ClosesBadly(Corridor):
    def close(self):
        raise OSError("no display")


class NoSpaces(Corridor):
    observation_space = None


def a_number():
    return 3


def raises():
    raise KeyError("license")


class Network(nn.Module):
    """One layer for both, of the width that policy.hidden_dim says."""

    def __init__(self, obs_dim, outputs, values, hidden_dim=8):
        super().__init__()
        self.body = nn.Linear(obs_dim, hidden_dim)
        self.choice = nn.Linear(hidden_dim, outputs)
        self.critic = nn.Linear(obs_dim, values) if values else None

    def forward(self, obs):
        outputs = self.choice(torch.tanh(self.body(obs)))
        return outputs, None if self.critic is None else self.critic(obs)


class TooWide(Network):
    def __init__(self, obs_dim, outputs, values):
        super().__init__(obs_dim, outputs + 1, values)


class NoCritic(Network):
    def forward(self, obs):
        return super().forward(obs)[0]


class Fails(Network):
    def forward(self, obs):
        raise IndexError("no")


class Detached(Network):
    def forward(self, obs):
        outputs, values = super().forward(obs)
        return outputs.detach(), values


class Memory(Network):
    def __init__(self, obs_dim, outputs, values, lstm_dim):
        super().__init__(obs_dim, outputs, values)


NUMBER = 3
'''


COUNTS = """
import dataclasses
import os
from pathlib import Path
import gymnasium

with (Path(__file__).parent / "imports").open("a") as file:
    file.write(f"{os.getpid()} ")


@dataclasses.dataclass
class State:
    steps: int = 0


class Counts(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.state = State()

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.state.steps += 1
        return obs, float(reward) + self.state.steps % 7, terminated, truncated, info
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def mine(file: Path) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "mine"}
    exec(file.read_text(), module)
    return module


def settings(folder: Path, *more: str) -> list[str]:
    dropped = ("env.train.id", "policy.normalize", "trainer.save_freq", "trainer.test_freq")
    base_settings = [item for item in Control().overrides(folder) if not item.startswith(dropped)]
    return [*base_settings, "trainer.save_freq=6", "trainer.test_freq=6", *more]


def test_named_in_the_configuration_they_learn(file: Path, tmp_path: Path) -> None:
    """The policy goes right, which is worth 8; the network has the width that it asked for."""
    named = [f"env.train.id={file}:corridor", f"policy.model_type={file}:Network", "env.eval.num_episodes=4"]
    more = ["actor_rollout_ref.actor.optim.lr=0.03", "algorithm.gamma=0", "policy.hidden_dim=6"]
    run = tether.train(overrides=settings(tmp_path, *named, *more))
    assert run.last_score == 8
    policy = tether.load(run.folder)
    assert policy.predict(np.zeros((3, 2), dtype=np.float32)).tolist() == [1, 1, 1]
    assert policy.make_env().unwrapped.length == 8
    weights = contents(run.folder / "global_step_6")["actor/policy.safetensors"]
    assert weights["network.body.weight"].shape == (6, 2)


def test_resuming_is_exact(file: Path, tmp_path: Path) -> None:
    named = [f"env.train.id={file}:Corridor", f"policy.model_type={file}:Network", "env.train.init_params.length=5"]
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1"]
    assert_resume_is_exact(tmp_path, Control().overrides(tmp_path, *named, *short), total=2)


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["env.train.vectorization=subprocess", "env.train.num_workers=2"], marks=pytest.mark.slow)],
    ids=str,
)
def test_the_state_of_wrappers_of_a_file_is_saved(
    more: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process imports the file once, whatever names it, so that what it defines is one class, and can be pickled."""
    (file := tmp_path / "wrapper.py").write_text(COUNTS)
    more = [f"env.train.wrappers=[{file}:Counts]", f"env.eval.wrappers=[{file}:Counts]", *more]
    short = ["trainer.total_training_steps=2", "env.eval.num_episodes=1"]
    assert_resume_is_exact(tmp_path, Control().overrides(tmp_path, *more, *short), total=2)
    assert "the state of the environments cannot be saved" not in caplog.text
    processes = (tmp_path / "imports").read_text().split()
    assert len(processes) == len(set(processes)) > 0


def test_a_second_run_finds_nothing_of_the_first_in_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "wrapper.py").write_text(
        "import gymnasium\n"
        "total = [0]\n"
        "class Counts(gymnasium.RewardWrapper):\n"
        "    def reward(self, reward):\n"
        "        total[0] += 1\n"
        "        return reward + total[0]\n"
    )
    more = ["env.train.id=CartPole-v1", f"env.train.wrappers=[{file}:Counts]", "trainer.total_training_steps=1"]
    runs = [tether.train(overrides=settings(tmp_path / name, *more)) for name in ("one", "other")]
    first, again = ([value for value in run.column("env/return") if value is not None] for run in runs)
    assert first == again
    assert max(first) > 100


def test_a_file_that_has_changed_is_imported_again(tmp_path: Path) -> None:
    (file := tmp_path / "numbers.py").write_text("one = 1")
    assert definition(f"{file}:one", "a.key") == 1
    file.write_text("one = 11")
    assert definition(f"{file}:one", "a.key") == 11


def test_environments_of_ones_own_in_subprocesses(file: Path, tmp_path: Path) -> None:
    named = [f"env.train.id={file}:corridor", "env.train.vectorization=subprocess", "env.train.num_workers=2"]
    run = tether.train(overrides=settings(tmp_path / "run", *named, "trainer.total_training_steps=1"))
    assert 0 <= run.last_score <= 8


def test_objects_train_as_the_same_things_in_files(file: Path, mine: dict[str, Any], tmp_path: Path) -> None:
    """A class draws the weights that the seed says; a module keeps its own, and stays as it is."""
    more = ["trainer.total_training_steps=2", "trainer.save_freq=2"]
    named = [f"env.train.id={file}:corridor", f"policy.model_type={file}:Network"]
    tether.train(overrides=settings(tmp_path / "files", *named, *more))
    objects = {"env": lambda: mine["corridor"](), "policy": mine["Network"]}
    run = tether.train(overrides=settings(tmp_path / "objects", *more), **objects)
    one, other = (contents(tmp_path / name / "global_step_2") for name in ("files", "objects"))
    assert same(one["actor/policy.safetensors"], other["actor/policy.safetensors"])
    policy = tether.load(run.folder, **objects)
    assert policy.predict(policy.make_env().reset(seed=0)[0]) in (0, 1)
    with pytest.raises(ValueError, match=r"object:env: .*Give it again, as env=\.\.\."):
        tether.load(run.folder, policy=objects["policy"]).make_env()
    assert tether.load(run.folder, policy=objects["policy"]).predict(np.zeros(2, np.float32)) in (0, 1)
    with pytest.raises(ValueError, match=r"object:policy: .*Give it again, as policy=\.\.\."):
        tether.load(run.folder)
    module = mine["Network"](2, 2, 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    again = tether.train(overrides=settings(tmp_path / "module", *more), env=objects["env"], policy=module)
    assert same(before, dict(module.state_dict()))
    trained = contents(again.checkpoint)["actor/policy.safetensors"]
    moved = (trained["network.body.weight"] - before["body.weight"]).abs().max()
    assert 0 < float(moved) < 0.1


def test_a_text_is_the_value_of_the_key(file: Path, mine: dict[str, Any], tmp_path: Path) -> None:
    """As ids and files: of environments, policies, models and data; a class makes environments, too."""
    more = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.preflight=False"]
    for number, env in enumerate(("CartPole-v1", f"{file}:Corridor", mine["Corridor"])):
        run = tether.train(overrides=settings(tmp_path / str(number), *more), env=env, policy=f"{file}:Network")
        assert run.step == 1
    with pytest.raises(ConfigError) as caught:
        tether.train(
            overrides={"algorithm.adv_estimator": "grpo"}, dataset=tmp_path / "a.jsonl", reward=str(tmp_path / "b.py"),
            model=str(tmp_path / "c"),
        )  # fmt: skip
    for key, path in (("data.train_files", "a.jsonl"), ("custom_reward_function.path", "b.py"), ("model.path", "c")):
        assert re.search(rf"{key}: .*{tmp_path / path}", str(caught.value))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ClosesBadly", r"reset\(seed=0\), a step and close\(\) do not give .* and None\. OSError: no display"),
        ("NoInfo", r"NoInfo: reset gives array\(\[0\., 0\.\].*, not \(observation, info\)"),
        ("OldStep", r"OldStep: a step gives 4 values, not the five of Gymnasium"),
        ("PaysNothing", r"PaysNothing: the reward is None \(NoneType\), no number"),
        ("PaysArrays", r"PaysArrays: the reward is array\(\[1\.\]\) \(ndarray of shape \(1,\)\), no number"),
        ("EndsInWords", r"EndsInWords: `terminated` is 'no' \(str\), neither True nor False"),
        ("Outside", r"reset gives array\(\[0., 0., 0.\]\) .*, which is not in Box"),
        ("a_number", "gives int; expected a gymnasium.Env"),
        ("raises", "a call with no arguments .* raised KeyError: 'license'"),
        ("corridr", "neither defines nor registers 'corridr'. Did you mean Corridor"),
        ("NoSpaces", "its observation_space is None; expected a gymnasium.Space"),
    ],
)
def test_an_environment_that_does_not_work_is_refused(file: Path, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"env\.train\.id.*{message}"):
        tether.train(overrides=settings(tmp_path / "run", f"env.train.id={file}:{name}"))


def test_arguments_that_a_function_does_not_take(file: Path, tmp_path: Path) -> None:
    configured = [f"env.train.id={file}:corridor", "env.train.init_params.size=3"]
    with pytest.raises(ValueError, match=r"a call with \{'size': 3\} \(env\.train\.init_params\) raised TypeError"):
        tether.train(overrides=settings(tmp_path / "run", *configured))


def test_a_function_that_draws_nothing_says_what_a_video_needs(file: Path) -> None:
    env_options = EnvOptions(f"{file}:raises", 1, init_params={"render_mode": "rgb_array"})
    with pytest.raises(ValueError, match=r"render_mode.* raised TypeError: .*\. A video needs render_mode as an arg"):
        make_vector_env(env_options)


def test_an_object_does_not_reach_subprocesses(mine: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"env\.train\.vectorization: subprocess, but object:env is in this process"):
        tether.train(overrides=settings(tmp_path / "run", "env.train.vectorization=subprocess"), env=mine["corridor"])
    one = mine["Corridor"]()
    for configured, named in ((one, r", or an id\."), (gymnasium.make("CartPole-v1"), r", or its id, 'CartPole-v1'\.")):
        with pytest.raises(ValueError, match=rf"env: a C\w+ that is made already\. .* at each call{named}"):
            tether.train(overrides=settings(tmp_path / "run"), env=configured)
    with pytest.raises(ValueError, match=r"env\.train\.id=object:env: gives the same environment again"):
        tether.train(overrides=settings(tmp_path / "run"), env=lambda: one)
    with pytest.raises(ValueError, match=r"env: int is no function"):
        tether.train(overrides=settings(tmp_path / "run"), env=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TooWide", r"a call on 4 observations of 2 numbers returned outputs \[4, 3\]; expected \[4, 2\]"),
        ("NoCritic", r"returned Tensor; expected a tuple \(outputs, values\)"),
        ("Fails", "raised IndexError: no"),
        ("Detached", "returned outputs without a gradient"),
        ("Memory", r"takes \(obs_dim, outputs, values, lstm_dim\); expected \(obs_dim, outputs, values\) and any of"),
        ("corridor", r"takes \(length=8\); expected"),
        ("NUMBER", "is a int; expected a class"),
    ],
)
def test_a_network_that_does_not_work_is_refused(file: Path, name: str, message: str, tmp_path: Path) -> None:
    configured = [f"env.train.id={file}:corridor", f"policy.model_type={file}:{name}"]
    with pytest.raises(ValueError, match=rf"policy\.model_type={file}:{name}: .*{message}"):
        tether.train(overrides=settings(tmp_path / "run", *configured))


def test_mistakes_are_found_with_the_configuration(file: Path, tmp_path: Path) -> None:
    def configured(model_type: str) -> list[str]:
        return settings(tmp_path / "run", "env.train.id=CartPole-v1", f"policy.model_type={model_type}")

    (problem,) = missing_inputs(load_config(None, configured(f"{file}:Netwrk")).config)
    assert problem.path == "policy.model_type"
    assert "Did you mean Network?" in problem.what
    with pytest.raises(ConfigError, match=r"'mlp' is not one of .* or a network of a file: FILE.py:NAME"):
        load_config(None, configured("mlp"))
    notes = load_config(None, [*configured(f"{file}:Network"), "policy.lstm_dim=4", "policy.hidden_dim=4"]).notes
    assert any("lstm_dim" in note for note in notes)
    assert not any("hidden_dim" in note for note in notes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("env.train.id", "{file}", "{file}: names no environment. Of a file give {file}:FUNCTION or {file}:ID."),
        ("env.train.id", "{file}:", "{file}:: names no environment. Of a file give {file}:FUNCTION or {file}:ID."),
        ("env.train.wrappers", "[{file}]", "{file}: names no class. Give module:Class or FILE.py:Class."),
        ("env.train.wrappers", "[TimeLimit]", "TimeLimit: names no class. Give module:Class or FILE.py:Class."),
    ],
)
def test_a_file_without_a_name_is_an_error(file: Path, tmp_path: Path, key: str, value: str, message: str) -> None:
    named = "env.train.id=CartPole-v1", f"{key}={value.format(file=file)}"
    (problem,) = missing_inputs(load_config(None, settings(tmp_path, *named)).config)
    assert (problem.path, problem.what) == (key, message.format(file=file))


def test_a_network_has_the_critic_of_its_name(file: Path) -> None:
    """The layer whose name begins with critic has the critic's learning rate."""
    from tether.control.policies.mlp_policy import make_policy
    from tether.control.policies.spec import PolicySpec

    spec = PolicySpec(obs_dim=2, choices=(2,), action_width=1, network=f"{file}:Network", hidden_dim=5)
    state = torch.get_rng_state()
    policy, again = make_policy(spec, 3), make_policy(spec, 3)
    assert torch.equal(state, torch.get_rng_state())
    assert same(dict(policy.state_dict()), dict(again.state_dict()))
    actor, critic = policy.parameter_groups()
    assert sum(value.numel() for value in actor) == (2 * 5 + 5) + (5 * 2 + 2)
    assert sum(value.numel() for value in critic) == 2 * 1 + 1
