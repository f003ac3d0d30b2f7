"""When episodes begin and in which states: after action chunks or only at a reset, individually or in groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tether.control.envs.protocol import EnvState, EnvStep, HeldEnv, Saved
from tether.keyed_random import seed_of
from tether.observations import Array, Observation


class PacedEnv:
    """Implements `VectorEnv` for environments that wait after an episode.

    The actions of a chunk are chosen together, so if an episode ends in the middle of a chunk, the remaining actions
    are
    not carried out: the environment waits, and the next episode begins with the next chunk.

    Args:
        env: the environments.
        chunk: number of actions chosen together.
        auto_reset: begin new episodes after a chunk; False: only in `reset`.
        group_size: number of adjacent environments whose k-th episodes begin in the same state.
        fixed_seed: all episodes of a group begin in the state that this seed and the group determine; None: in
            different ones.
        first: index of the first environment, if the environments of a run are divided among ranks.
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
        self._seed, self._steps = seed, 0
        self._begun = [0] * self.num_envs
        self._waiting = np.zeros(self.num_envs, dtype=np.bool_)
        return self._begin(range(self.num_envs))

    def step(self, actions: Array) -> EnvStep:
        step = self._env.step(actions)
        self._steps += 1
        self._waiting |= step.terminated | step.truncated
        if self._auto_reset and self._steps % self._chunk == 0 and self._waiting.any():
            step = replace(step, obs=self._begin(np.flatnonzero(self._waiting).tolist()))
            self._waiting[:] = False
        return step

    def render(self) -> NDArray[np.uint8]:
        return self._env.render()

    def get_state(self) -> EnvState:
        inner = self._env.get_state()
        return EnvState((self._seed, self._steps, [*self._begun], self._waiting.copy(), inner.data), inner.left_out)

    def set_state(self, data: Saved) -> None:
        self._seed, self._steps, self._begun, self._waiting, inner = data
        self._env.set_state(inner)

    def close(self) -> None:
        self._env.close()

    def _begin(self, which: Iterable[int]) -> Observation:
        seeds = {n: self._next_seed(n) for n in which}
        for n in seeds:
            self._begun[n] += 1
        return self._env.begin(seeds)

    def _next_seed(self, n: int) -> int | None:
        """Return the seed of an environment's next episode; None if its own generator continues."""
        index = self._first + n
        group = index // self._group_size
        if self._fixed_seed is not None:
            return seed_of(self._fixed_seed, 0, "episode", group)
        if self._group_size > 1:
            return seed_of(self._seed, self._begun[n], "episode", group)
        return self._seed + index if self._begun[n] == 0 else None
