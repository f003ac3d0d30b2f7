"""Wrappers of vector environments, which delegate everything that they do not change.

They decode a policy's actions, seed the environments of one rank, control when episodes begin, and apply the timeout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tether.control.envs.protocol import (
    ActionSpec,
    EnvState,
    EnvStep,
    Floats,
    ManualResetEnv,
    Rollout,
    Saved,
    VectorEnv,
)
from tether.keyed_random import seed_of
from tether.observations import Array, Observation
from tether.runtime.late_calls import CallWatchdog

Result = TypeVar("Result")


class ActionCode(Protocol):
    """A policy's encoding of continuous actions of D columns."""

    @property
    def actions(self) -> ActionSpec:
        """The action space of the policy."""
        ...

    @property
    def action_dim(self) -> int:
        """D: columns of the environment's actions."""
        ...

    def decode(self, columns: Array) -> Floats:
        """Return the environment's actions [..., D] for a policy's encoded actions."""
        ...


class ActionCodeEnv:
    """Makes environments with continuous actions accept a policy's encoded actions."""

    def __init__(self, env: VectorEnv, code: ActionCode) -> None:
        self._env, self._code = env, code
        self.id, self.num_envs, self.layout = env.id, env.num_envs, env.layout
        self.actions, self.spaces = code.actions, env.spaces

    @property
    def seeds(self) -> NDArray[np.int64] | None:
        """`ManualResetEnv.seeds`; None if the environments are reset together."""
        return getattr(self._env, "seeds", None)

    def reset(self, seed: int) -> Observation:
        return self._env.reset(seed)

    def step(self, actions: Array) -> EnvStep:
        return self._env.step(self._code.decode(actions))

    def get_state(self) -> EnvState:
        return self._env.get_state()

    def set_state(self, data: Saved) -> None:
        self._env.set_state(data)

    def close(self) -> None:
        self._env.close()


class OffsetSeedEnv:
    """Seeds the environments of a rank by their index in the run; everything else is delegated."""

    def __init__(self, env: VectorEnv, first: int) -> None:
        self._env, self._first = env, first
        self.step = env.step  # an attribute, to avoid `__getattr__` at each step

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        return self._env.reset(seed + self._first)


class ResetPolicyEnv:
    """Implements `VectorEnv` for environments that wait after an episode, and decides when and how the next begins.

    The actions of a chunk are chosen together. If an episode ends in the middle of a chunk, the remaining actions are
    not executed: the environment waits, and the next episode begins with the next chunk.

    Args:
        env: the environments.
        chunk: number of actions chosen together.
        auto_reset: begin new episodes after a chunk; False: only in `reset`.
        group_size: number of adjacent environments whose k-th episodes begin in the same state.
        fixed_seed: all episodes of a group begin in the state determined by this seed and the group; None: episodes
            begin in different states.
        first: index of the first environment, if the environments of a run are divided among ranks.
    """

    def __init__(
        self,
        env: ManualResetEnv,
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
        self.layout, self.spaces = env.layout, env.spaces
        self._chunk, self._auto_reset = chunk, auto_reset
        self._seed = self._steps = 0
        self._begun = [0] * self.num_envs
        self._waiting = np.zeros(self.num_envs, dtype=np.bool_)
        self._group_size, self._fixed_seed = group_size, fixed_seed
        self.seeds = env.seeds

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
        """Return the seed of an environment's next episode; None: its generator continues."""
        index = self._first + n
        group = index // self._group_size
        if self._fixed_seed is not None:
            return seed_of(self._fixed_seed, 0, "episode", group)
        if self._group_size > 1:
            return seed_of(self._seed, self._begun[n], "episode", group)
        return self._seed + index if self._begun[n] == 0 else None


class TimedEnv:
    """Raises an error if a step or a reset exceeds the timeout, and warns if closing fails.

    Everything else is delegated.

    Args:
        env: environments that step in this process.
        timeout: maximum seconds for a step, a reset or a compiled rollout.
        role: section of the configuration, for error messages.
    """

    def __init__(self, env: VectorEnv, timeout: float, role: str) -> None:
        self._env = env
        self._calls = CallWatchdog(
            timeout,
            f"{env.id} took more than {role}.timeout={timeout:g} s for a step, a reset or to close. Raise it, or set "
            f"{role}.vectorization=subprocess, where a process that hangs is replaced.",
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        return self._timed(self._env.reset, seed)

    def step(self, actions: Array) -> EnvStep:
        return self._timed(self._env.step, actions)

    @property
    def rollout(self) -> Rollout | None:
        """The environments' ``rollout``, with the timeout of a step; None if they have none."""
        rollout: Rollout | None = getattr(self._env, "rollout", None)
        return None if rollout is None else partial(self._timed, rollout)

    def _timed(self, call: Callable[..., Result], *arguments: object) -> Result:
        self._calls.begin()
        try:
            return call(*arguments)
        except SystemExit as exit:  # otherwise the run would exit here as if it were complete
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
