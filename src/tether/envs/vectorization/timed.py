"""Environments that step in this process, with a deadline."""

from __future__ import annotations

import warnings

from tether.envs.protocol import EnvStep, VectorEnv
from tether.observations import Array, Observation
from tether.runtime.late_calls import LateCalls


class TimedEnv:
    """Ends a step or a reset that takes too long in an error, and closing that does in a warning.

    Everything else is the environments' own.

    Args:
        env: environments that step in this process.
        timeout: seconds that a step or a reset may take.
        role: section of the configuration, for the error.
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
        """See `VectorEnv.reset`.

        Raises:
            RuntimeError: it took too long, or would end this process.
        """
        self._calls.begin()
        try:
            return self._env.reset(seed)
        except SystemExit as exit:  # else the run would end here as if it were done
            raise RuntimeError(f"{self._env.id} asked Python to exit ({exit.code})") from exit
        finally:
            self._calls.end()

    def step(self, actions: Array) -> EnvStep:
        """See `VectorEnv.step`.

        Raises:
            RuntimeError: it took too long, or would end this process.
        """
        self._calls.begin()
        try:
            return self._env.step(actions)
        except SystemExit as exit:  # else the run would end here as if it were done
            raise RuntimeError(f"{self._env.id} asked Python to exit ({exit.code})") from exit
        finally:
            self._calls.end()

    def close(self) -> None:
        """See `VectorEnv.close`; what fails is a warning: there is nothing more that is asked of them."""
        self._calls.begin()
        try:
            self._env.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever the code of a user's class raises)
            what = f"{self._env.id} could not be closed. {type(error).__name__}: {error}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        finally:
            self._calls.end()
            self._calls.close()
