"""Environments that accept actions in a policy's encoding."""

from __future__ import annotations

from typing import Protocol

from tether.control.envs.protocol import ActionSpec, EnvState, EnvStep, Floats, Saved, VectorEnv
from tether.observations import Array, Observation


class ActionCode(Protocol):
    """How a policy encodes continuous actions of D columns."""

    @property
    def actions(self) -> ActionSpec:
        """The action space of the policy."""
        ...

    @property
    def action_dim(self) -> int:
        """D: columns of the environment's actions."""
        ...

    def decode(self, columns: Array) -> Floats:
        """Return the actions [..., D] of the policy's output."""
        ...


class CodedEnv:
    """Makes environments with continuous actions accept those of a policy.

    Args:
        env: the environments.
        code: encoding of the policy.
    """

    def __init__(self, env: VectorEnv, code: ActionCode) -> None:
        self._env, self._code = env, code
        self.id, self.num_envs, self.layout = env.id, env.num_envs, env.layout
        self.actions = code.actions

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
