"""Environments of envpool, which are stepped in C++ threads."""

from __future__ import annotations

from collections.abc import Callable

import envpool

from tether.control.envs.gymnasium_types import Simulator
from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv
from tether.control.envs.make import EnvOptions, ObservationOptions, disabled_clipping_arguments
from tether.control.envs.protocol import EnvState, EnvStep, Saved
from tether.observations import Array, Observation
from tether.spelling import did_you_mean


class EnvPool:
    """A pool that is recreated at each reset, because envpool accepts a seed only at construction."""

    def __init__(self, id: str, make: Callable[[int], GymnasiumVectorEnv]) -> None:
        self.id = id
        self._make = make
        self._pool = make(0)
        self.num_envs, self.actions = self._pool.num_envs, self._pool.actions
        self.layout, self.spaces = self._pool.layout, self._pool.spaces

    def reset(self, seed: int) -> Observation:
        self._pool.close()
        self._pool = self._make(seed)
        return self._pool.reset(None)  # the pool was created with the seed, and warns about one here

    def step(self, actions: Array) -> EnvStep:
        return self._pool.step(actions)

    def get_state(self) -> EnvState:
        return EnvState(None, ("envpool, which keeps its environments in C++",))

    def set_state(self, data: Saved) -> None:
        pass

    def close(self) -> None:
        self._pool.close()


def make_envpool(options: EnvOptions) -> EnvPool:
    """Make a pool of an envpool task.

    Raises:
        ValueError: envpool has no such id, or an option requires single environments.
    """
    task_ids = envpool.list_all_envs()
    if options.id not in task_ids:
        fix = did_you_mean(options.id, task_ids, count=3) or " envpool.list_all_envs() lists those that there are."
        raise ValueError(f"{options.role}.id: envpool has no {options.id}.{fix} Or set {options.role}.env_type.")
    if options.ignore_terminations:
        raise ValueError(f"{options.role}.ignore_terminations: envpool always resets. Use env_type=gymnasium.")
    if options.wrappers:
        raise ValueError(f"{options.role}.wrappers: envpool steps in C++, which wraps nothing. Use env_type=gymnasium.")
    if options.view != ObservationOptions():
        raise ValueError(
            "env.train.drop_observations, frame_stack, info_metrics: envpool shows what it shows. Stack frames with "
            f"{options.role}.init_params.stack_num, or use env_type=gymnasium."
        )
    limit = {} if options.max_episode_steps is None else {"max_episode_steps": options.max_episode_steps}

    def make(seed: int) -> GymnasiumVectorEnv:
        pool: Simulator = envpool.make_gymnasium(  # envpool's annotation says Env, but it is a VectorEnv
            options.id,
            num_envs=options.num_envs,
            num_threads=options.num_workers,
            seed=seed % 2**31,
            **limit,
            **{**options.init_params, **disabled_clipping_arguments(options, options.init_params)},
        )
        return GymnasiumVectorEnv(options.id, pool)

    return EnvPool(options.id, make)
