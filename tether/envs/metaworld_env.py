"""MetaWorld v3 by names of its own: a task, or a suite whose episodes are of tasks in turn drawn at random."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import gymnasium
import metaworld  # registers its ids
from metaworld import env_dict
from numpy.typing import NDArray

from tether.envs.make import EnvOptions

TASKS = tuple(metaworld.ALL_V3_ENVIRONMENTS)
SUITES = {"MT10": tuple(env_dict.MT10_V3), "MT25": tuple(env_dict.MT25_V3), "MT50": tuple(env_dict.MT50_V3)}
Env = gymnasium.Env[Any, Any]


class MetaWorldTasks(gymnasium.Env[NDArray[Any], NDArray[Any]]):
    """Some tasks; which one an episode is of, and its goal, follow from the seed.

    So environments that begin with the same seed have the same task: a group of estimators that compare episodes is one
    task. Where there are several, the observation ends in one entry for each, which is 1 for that of the episode.

    Args:
        names: of MetaWorld's tasks.
        arguments: of `gymnasium.make` for each; ``seed`` decides on the goals that there are.
    """

    def __init__(self, names: tuple[str, ...], arguments: Mapping[str, Any]) -> None:
        self._names, self._arguments = names, {"seed": 0, **arguments}
        self._made: dict[int, Env] = {}
        self._env = self._task(0)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.render_mode = self._env.render_mode
        self.metadata = self._env.metadata

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray[Any], Any]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self._env = self._task(int(self.np_random.integers(len(self._names))))
        unwrapped: Any = self._env.unwrapped
        unwrapped.seed(int(self.np_random.integers(2**31)))  # it takes no seed from `reset`
        return self._env.reset(options=options)

    def step(self, action: NDArray[Any]) -> tuple[NDArray[Any], Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; ``info["success"]`` says whether the task is solved in this step."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        return obs, reward, bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self._env.render()

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        for env in self._made.values():
            env.close()

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


def make_env(options: EnvOptions, arguments: Mapping[str, Any]) -> MetaWorldTasks:
    """Make one environment of a task (``reach-v3``) or a suite (``MT10``).

    Raises:
        ValueError: there is no such name.
    """
    if options.id in TASKS:
        return MetaWorldTasks((options.id,), arguments)
    if options.id in SUITES:
        return MetaWorldTasks(SUITES[options.id], arguments)
    near = get_close_matches(options.id, [*TASKS, *SUITES], n=3)
    fix = f"Did you mean {' or '.join(near)}?" if near else f"Use {', '.join(SUITES)}, or a task such as {TASKS[0]}."
    raise ValueError(f"{options.role}.id: MetaWorld has no {options.id}. {fix}")
