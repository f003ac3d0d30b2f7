"""Environments that step in this process, with a timeout."""

from __future__ import annotations

import warnings

from tether.control.envs.protocol import EnvStep, VectorEnv
from tether.observations import Array, Observation
from tether.runtime.late_calls import LateCalls


class TimedEnv:
    """Raises an error if a step or a reset exceeds the timeout, and warns if closing fails.

    Everything else is delegated.

    Args:
        env: environments that step in this process.
        timeout: maximum seconds for a step or a reset.
        role: section of the configuration, for error messages.
    """

    def __init__(self, env: VectorEnv, timeout: float, role: str) -> None:
        self._env = env
        self._calls = LateCalls(
            timeout,
            f"{env.id} took more than {role}.timeout={timeout:g} s for a step, a reset or to close. Raise it, or set "
            f"{role}.vectorization=subprocess, where a process that hangs is replaced.",
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        self._calls.begin()
        try:
            return self._env.reset(seed)
        except SystemExit as exit:  # otherwise the run would end here as if it were complete
            raise RuntimeError(f"{self._env.id} asked Python to exit ({exit.code})") from exit
        finally:
            self._calls.end()

    def step(self, actions: Array) -> EnvStep:
        self._calls.begin()
        try:
            return self._env.step(actions)
        except SystemExit as exit:  # otherwise the run would end here as if it were complete
            raise RuntimeError(f"{self._env.id} asked Python to exit ({exit.code})") from exit
        finally:
            self._calls.end()

    def close(self) -> None:
        self._calls.begin()
        try:
            self._env.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (user classes may raise anything)
            what = f"{self._env.id} could not be closed. {type(error).__name__}: {error}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        finally:
            self._calls.end()
            self._calls.close()
