"""Environments that take actions in the code of a policy."""

from __future__ import annotations

from typing import Protocol

from tether.envs.protocol import ActionSpec, EnvState, EnvStep, Floats, Saved, VectorEnv
from tether.observations import Array, Observation


class ActionCode(Protocol):
    """How a policy writes actions of D numbers."""

    @property
    def actions(self) -> ActionSpec:
        """The actions as the policy gives them."""
        ...

    @property
    def taken(self) -> int:
        """D."""
        ...

    def decode(self, columns: Array) -> Floats:
        """Actions [..., D] of what the policy gives."""
        ...


class CodedEnv:
    """Makes environments of continuous actions take those of a policy.

    Args:
        env: the environments.
        code: of the policy.
    """

    def __init__(self, env: VectorEnv, code: ActionCode) -> None:
        self._env, self._code = env, code
        self.id, self.num_envs, self.layout = env.id, env.num_envs, env.layout
        self.actions = code.actions

    def reset(self, seed: int) -> Observation:
        """See `VectorEnv.reset`."""
        return self._env.reset(seed)

    def step(self, actions: Array) -> EnvStep:
        """See `VectorEnv.step`."""
        return self._env.step(self._code.decode(actions))

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        return self._env.get_state()

    def set_state(self, data: Saved) -> None:
        """See `VectorEnv.set_state`."""
        self._env.set_state(data)

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._env.close()
