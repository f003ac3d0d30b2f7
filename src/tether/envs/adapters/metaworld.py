"""MetaWorld v3 by names of its own: a task, or a suite whose episodes are of tasks in turn drawn at random."""

from __future__ import annotations

from typing import SupportsFloat

import gymnasium
import metaworld  # registers its ids
import numpy as np
from metaworld import env_dict
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray

from tether.envs.adapters.metaworld_pictures import PictureObservations
from tether.envs.gymnasium_types import Arguments, Env, Info, Raw, Simulator
from tether.envs.make import EnvOptions
from tether.envs.vectorization.action_repeat import Repeated
from tether.observations import Array
from tether.spelling import did_you_mean

TASKS = tuple(metaworld.ALL_V3_ENVIRONMENTS)
SUITES = {"MT10": tuple(env_dict.MT10_V3), "MT25": tuple(env_dict.MT25_V3), "MT50": tuple(env_dict.MT50_V3)}
REWARDS = ("dense", "success")
STATE = 39
"""Numbers of a task's observation; what a suite adds stands behind them."""


class MetaWorldTasks(gymnasium.Env[Array, Array]):
    """Some tasks; which one an episode is of, and its goal, follow from the seed.

    So environments that begin with the same seed have the same task: a group of estimators that compare episodes is one
    task. Where there are several, the observation ends in one entry for each, which is 1 for that of the episode.

    Args:
        names: of MetaWorld's tasks.
        arguments: of `gymnasium.make` for each; ``seed`` decides on the goals that there are.
        reward: MetaWorld's own is ``dense``; ``success`` pays 1 for a step that solves the task, and nothing else.
    """

    def __init__(self, names: tuple[str, ...], arguments: Arguments, reward: str = "dense") -> None:
        self._names, self._arguments = names, {"seed": 0, **arguments}
        self._pays_success = reward == "success"
        self._made: dict[int, Env] = {}
        self._number = 0
        self._obs = np.zeros(STATE)
        self._env = self._task(0)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.render_mode = self._env.render_mode
        self.metadata = self._env.metadata

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(len(self._names)))
        self._env = self._task(self._number)
        self.simulator.seed(int(self.np_random.integers(2**31)))  # it takes no seed from `reset`
        self._obs, info = self._env.reset(options=options)
        return self._obs, info

    def step(self, action: Array) -> tuple[Array, SupportsFloat, bool, bool, Info]:
        """See `gymnasium.Env.step`; ``info["success"]`` says whether the task is solved in this step."""
        self._obs, reward, terminated, truncated, info = self._env.step(action)
        pays = float(info["success"]) if self._pays_success else reward
        return self._obs, pays, bool(terminated), bool(truncated), info

    def render(self) -> Raw:
        """See `gymnasium.Env.render`."""
        return self._env.render()

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        for env in self._made.values():
            env.close()

    @property
    def simulator(self) -> Simulator:
        """MetaWorld's environment of the task that is played."""
        return self._env.unwrapped

    @property
    def task(self) -> str:
        """The task in words: ``pick place`` for ``pick-place-v3``."""
        return in_words(self._names[self._number])

    def scripted_action(self) -> NDArray[np.float32]:
        """The action of MetaWorld's scripted policy for the task; it reads the numbers, whatever a policy sees."""
        policy = ENV_POLICY_MAP[self._names[self._number]]()
        return np.clip(policy.get_action(self._obs[:STATE]), -1, 1).astype(np.float32)

    def _task(self, number: int) -> Env:
        """A task, which is made when an episode is of it for the first time."""
        if number not in self._made:
            several = len(self._names) > 1
            marked = {"use_one_hot": True, "env_id": number, "num_tasks": len(self._names)} if several else {}
            name, arguments = self._names[number], self._arguments
            self._made[number] = gymnasium.make(
                "Meta-World/MT1", disable_env_checker=True, env_name=name, **marked, **arguments
            )
        return self._made[number]


def in_words(name: str) -> str:
    """A task's name as a text that a policy can read."""
    return name.removesuffix("-v3").replace("-", " ")


def scripted(env: Env, obs: Raw) -> NDArray[np.float32]:
    """Play as MetaWorld's scripted policies do."""
    tasks: Simulator = env.unwrapped
    action: NDArray[np.float32] = tasks.scripted_action()
    return action


def make_env(options: EnvOptions, arguments: Arguments) -> Env:
    """Make one environment of a task (``reach-v3``) or a suite (``MT10``).

    Args:
        options: of the environments.
        arguments: of `gymnasium.make`, and of this adapter: ``camera`` and ``picture_size``, see
            `PictureObservations`; ``action_repeat``, how often an action is carried out;
            ``reward``, see `MetaWorldTasks`.

    Raises:
        ValueError: there is no such name, no such camera, or no such reward.
    """
    given = dict(arguments)
    seen = {name: given.pop(name) for name in ("camera", "picture_size") if name in given}
    repeat, reward = given.pop("action_repeat", 1), given.pop("reward", "dense")
    if reward not in REWARDS:
        raise ValueError(f"{options.role}.init_params.reward is {reward!r}. Use {' or '.join(REWARDS)}.")
    if "max_episode_steps" in given:
        given["max_episode_steps"] *= repeat  # of the simulator
    names = _names(options)
    env: Env = MetaWorldTasks(names, given, reward)
    if repeat > 1:
        env = Repeated(env, repeat)
    return PictureObservations(env, max(len(in_words(name)) for name in names), **seen) if seen else env


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
