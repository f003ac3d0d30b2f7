"""MetaWorld v3: a single task, or a suite whose task is drawn at random for each episode, by MetaWorld's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

import gymnasium
import metaworld  # registers its ids
import numpy as np
from metaworld import env_dict
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray

from tether.control.envs.action_repeat import Repeated
from tether.control.envs.gymnasium_types import Arguments, Env, Info, Raw, Simulator
from tether.control.envs.make import EnvOptions
from tether.integrations.robots.metaworld_pictures import PictureObservations
from tether.integrations.robots.metaworld_sentences import SENTENCES
from tether.observations import Array
from tether.spelling import did_you_mean

TASKS = tuple(metaworld.ALL_V3_ENVIRONMENTS)
SUITES = {
    "MT10": tuple(env_dict.MT10_V3), "MT25": tuple(env_dict.MT25_V3), "MT50": tuple(env_dict.MT50_V3),
    "ML45-train": tuple(env_dict.ML45_V3["train"]), "ML45-test": tuple(env_dict.ML45_V3["test"]),
}  # fmt: skip
REWARDS = ("dense", "success")
INSTRUCTIONS = ("names", "sentences")
PICTURES = ("camera", "camera_position", "picture_size", "rotated", "shadows")
"""Arguments of `PictureObservations`; any of them enables image observations."""
STATE = 39
"""Size of a task's observation; a suite appends its entries after these."""


class MetaWorldTasks(gymnasium.Env[Array, Array]):
    """One or several tasks; the seed determines the task and the goal of each episode.

    Environments with the same seed therefore get the same task, as estimators that compare the episodes of a group
    require. With several tasks, the observation ends with a one-hot encoding of the task.

    Args:
        names: names of MetaWorld tasks.
        arguments: arguments of `gymnasium.make` for each task; ``seed`` determines the set of goals.
        reward: ``dense`` is MetaWorld's reward; ``success`` is 1 in a step that solves the task, otherwise 0.
        settling_steps: idle steps at the start of an episode.
        instructions: the instruction of each task; by default its name in words.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        arguments: Arguments,
        reward: str = "dense",
        settling_steps: int = 0,
        instructions: Mapping[str, str] | None = None,
    ) -> None:
        self._names, self._arguments = names, {"seed": 0, **arguments}
        self._pays_success, self._settling_steps = reward == "success", settling_steps
        self._instructions = instructions or {name: in_words(name) for name in names}
        self._made: dict[int, Env] = {}
        self._number = 0
        self._obs = np.zeros(STATE)
        self._env = self._task(0)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.render_mode = self._env.render_mode
        self.metadata = self._env.metadata

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(len(self._names)))
        self._env = self._task(self._number)
        self.simulator.seed(int(self.np_random.integers(2**31)))  # the simulator ignores the seed of `reset`
        self._obs, info = self._env.reset(options=options)
        for _ in range(self._settling_steps):
            self._obs, *_, info = self._env.step(np.zeros(self.action_space.shape or (), np.float32))
        return self._obs, info

    def step(self, action: Array) -> tuple[Array, SupportsFloat, bool, bool, Info]:
        self._obs, reward, terminated, truncated, info = self._env.step(action)
        pays = float(info["success"]) if self._pays_success else reward
        return self._obs, pays, bool(terminated), bool(truncated), info

    def render(self) -> Raw:
        return self._env.render()

    def close(self) -> None:
        for env in self._made.values():
            env.close()

    @property
    def simulator(self) -> Simulator:
        """MetaWorld's environment of the current task."""
        return self._env.unwrapped

    @property
    def task(self) -> str:
        """The instruction of the current task."""
        return self._instructions[self._names[self._number]]

    def scripted_action(self) -> NDArray[np.float32]:
        """Return the action of MetaWorld's scripted policy, which always reads the full state."""
        policy = ENV_POLICY_MAP[self._names[self._number]]()
        return np.clip(policy.get_action(self._obs[:STATE]), -1, 1).astype(np.float32)

    def _task(self, index: int) -> Env:
        """Return a task's environment, created the first time an episode uses it."""
        if index not in self._made:
            several = len(self._names) > 1
            marked = {"use_one_hot": True, "env_id": index, "num_tasks": len(self._names)} if several else {}
            name, arguments = self._names[index], self._arguments
            self._made[index] = gymnasium.make(
                "Meta-World/MT1", disable_env_checker=True, env_name=name, **marked, **arguments
            )
        return self._made[index]


def in_words(name: str) -> str:
    """Return a task's name as an instruction for a policy."""
    return name.removesuffix("-v3").replace("-", " ")


def scripted(env: Env, obs: Raw) -> NDArray[np.float32]:
    """Return the action of MetaWorld's scripted policy for the current task."""
    tasks: Simulator = env.unwrapped
    action: NDArray[np.float32] = tasks.scripted_action()
    return action


def make_env(options: EnvOptions, arguments: Arguments) -> Env:
    """Make one environment of a task (``reach-v3``) or a suite (``MT10``).

    Args:
        options: options of the environments.
        arguments: arguments of `gymnasium.make` and of this adapter: ``camera``, ``camera_position``, ``picture_size``,
            ``rotated`` and ``shadows`` of `PictureObservations`, ``action_repeat`` of `Repeated`, ``reward`` and
            ``settling_steps`` of `MetaWorldTasks`, and ``instructions``: ``names`` of tasks in words, or ``sentences``
            (`tether.integrations.robots.metaworld_sentences`).

    Raises:
        ValueError: there is no such task, camera or reward, or no such instructions.
    """
    env_kwargs = dict(arguments)
    picture_options = {name: env_kwargs.pop(name) for name in PICTURES if name in env_kwargs}
    repeat, reward = env_kwargs.pop("action_repeat", 1), env_kwargs.pop("reward", "dense")
    settling_steps, instructions = env_kwargs.pop("settling_steps", 0), env_kwargs.pop("instructions", "names")
    for key, value, supported in (("reward", reward, REWARDS), ("instructions", instructions, INSTRUCTIONS)):
        if value not in supported:
            raise ValueError(f"{options.role}.init_params.{key} is {value!r}. Use {' or '.join(supported)}.")
    if "max_episode_steps" in env_kwargs:  # counted in simulator steps
        env_kwargs["max_episode_steps"] = env_kwargs["max_episode_steps"] * repeat + settling_steps
    names = _names(options)
    texts = SENTENCES if instructions == "sentences" else {name: in_words(name) for name in names}
    env: Env = MetaWorldTasks(names, env_kwargs, reward, settling_steps, texts)
    if repeat > 1:
        env = Repeated(env, repeat)
    if not picture_options:
        return env
    # All instructions, so that a policy of one suite can be evaluated in another.
    return PictureObservations(env, tuple(texts.values()), **picture_options)


def _names(options: EnvOptions) -> tuple[str, ...]:
    if options.id in TASKS:
        return (options.id,)
    if options.id in SUITES:
        return SUITES[options.id]
    fix = (
        did_you_mean(options.id, [*TASKS, *SUITES], count=3)
        or f" Use {', '.join(SUITES)}, or a task such as {TASKS[0]}."
    )
    raise ValueError(f"{options.role}.id: MetaWorld has no {options.id}.{fix}")
