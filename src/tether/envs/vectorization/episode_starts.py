"""When episodes begin, and in which states: at the ends of action chunks or of rollouts, alone or in groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tether.envs.protocol import EnvState, EnvStep, HeldEnv, Saved
from tether.keyed_random import seed_of
from tether.observations import Array, Observation


class PacedEnv:
    """Makes a `VectorEnv` of environments that wait.

    The actions of a chunk are decided on together, so an episode that ends in the middle of a chunk has no use for the
    rest of it: the environment waits, and the next episode begins with the next chunk.

    Args:
        env: the environments.
        chunk: actions that are decided on at once.
        auto_reset: begin new episodes after chunks; False: only in `reset`.
        group_size: environments in a row whose k-th episodes begin in the same state.
        fixed_seed: every episode of a group begins in the state of this seed and the group; None: each in another.
        first: number of the first environment, where those of a run are divided among processes.
    """

    def __init__(
        self,
        env: HeldEnv,
        *,
        chunk: int = 1,
        auto_reset: bool = True,
        group_size: int = 1,
        fixed_seed: int | None = None,
        first: int = 0,
    ) -> None:
        self._first = first
        self._env = env
        self.id, self.num_envs, self.actions = env.id, env.num_envs, env.actions
        self.layout = env.layout
        self._chunk, self._auto_reset = chunk, auto_reset
        self._seed = self._steps = 0
        self._begun = [0] * self.num_envs
        self._waiting = np.zeros(self.num_envs, dtype=np.bool_)
        self._group_size, self._fixed_seed = group_size, fixed_seed

    def reset(self, seed: int) -> Observation:
        """See `VectorEnv.reset`."""
        self._seed, self._steps = seed, 0
        self._begun = [0] * self.num_envs
        self._waiting = np.zeros(self.num_envs, dtype=np.bool_)
        return self._begin(range(self.num_envs))

    def step(self, actions: Array) -> EnvStep:
        """See `VectorEnv.step`."""
        step = self._env.step(actions)
        self._steps += 1
        self._waiting |= step.terminated | step.truncated
        if self._auto_reset and self._steps % self._chunk == 0 and self._waiting.any():
            step = replace(step, obs=self._begin(np.flatnonzero(self._waiting).tolist()))
            self._waiting[:] = False
        return step

    def render(self) -> NDArray[np.uint8]:
        """See `Renders.render`."""
        return self._env.render()

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        inner = self._env.get_state()
        return EnvState((self._seed, self._steps, [*self._begun], self._waiting.copy(), inner.data), inner.left_out)

    def set_state(self, data: Saved) -> None:
        """See `VectorEnv.set_state`."""
        self._seed, self._steps, self._begun, self._waiting, inner = data
        self._env.set_state(inner)

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._env.close()

    def _begin(self, which: Iterable[int]) -> Observation:
        seeds = {n: self._next_seed(n) for n in which}
        for n in seeds:
            self._begun[n] += 1
        return self._env.begin(seeds)

    def _next_seed(self, n: int) -> int | None:
        """Seed of the next episode of an environment; None where its own generator may go on."""
        number = self._first + n
        group = number // self._group_size
        if self._fixed_seed is not None:
            return seed_of(self._fixed_seed, 0, "episode", group)
        if self._group_size > 1:
            return seed_of(self._seed, self._begun[n], "episode", group)
        return self._seed + number if self._begun[n] == 0 else None
