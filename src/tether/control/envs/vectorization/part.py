"""The environments of one rank, if those of a run are divided among ranks."""

from __future__ import annotations

from tether.control.envs.protocol import VectorEnv
from tether.observations import Observation


class PartOfEnvs:
    """Seeds environments by their index in the run; everything else is delegated.

    Args:
        env: the environments.
        first: index of the first one in the run.
    """

    def __init__(self, env: VectorEnv, first: int) -> None:
        self._env, self._first = env, first
        self.step = env.step  # bound here, to save a lookup by `__getattr__` at each step

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        return self._env.reset(seed + self._first)
