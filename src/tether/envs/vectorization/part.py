"""Some of the environments of a run, of which others are in other processes."""

from __future__ import annotations

from tether.envs.protocol import VectorEnv
from tether.observations import Observation


class PartOfEnvs:
    """Seeds environments by their numbers in the whole; everything else is their own.

    Args:
        env: the environments.
        first: number of the first of them.
    """

    def __init__(self, env: VectorEnv, first: int) -> None:
        self._env, self._first = env, first
        self.step = env.step  # without a detour

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        """See `VectorEnv.reset`."""
        return self._env.reset(seed + self._first)
