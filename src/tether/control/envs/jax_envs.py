"""Environments written in JAX: vectorizes, compiles and resets N copies of a user's environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from gymnasium import spaces
from jax import numpy as jnp

from tether.control.envs.conversion import (
    ActionCodec,
    ObservationReader,
    check_methods,
    check_spaces,
    read_flags,
    read_rewards,
)
from tether.control.envs.gymnasium_types import Raw, Space
from tether.control.envs.protocol import EnvState, EnvStep, Floats, PolicyArrays, Rollout, RolloutRows, Saved
from tether.observations import Array, Observation, copied


class JaxEnv(Protocol):
    """An environment as pure functions, which `jax.vmap` and `jax.jit` can transform."""

    observation_space: Space
    action_space: Space

    def reset(self, key: Raw) -> tuple[Raw, Raw]:
        """Return the first observation of an episode, and the state, which may be any tree of arrays."""
        ...

    def step(self, key: Raw, state: Raw, action: Raw) -> tuple[Raw, Raw, Raw, Raw, Raw]:
        """Return the observation after an action, the state, the reward, and whether the episode terminated or was
        truncated."""
        ...


class JaxVectorEnv:
    """Implements `VectorEnv` for a `JaxEnv`: the step that ends an episode begins the next one.

    With seed s, environment i uses the random key of s + i.

    Args:
        id: name of the environment in error messages.
        env: one environment.
        num_envs: number of environments.
        max_episode_steps: time limit, which truncates; None: only the environment ends episodes.
    """

    def __init__(self, id: str, env: JaxEnv, num_envs: int, max_episode_steps: int | None = None) -> None:
        self.id, self.num_envs = id, num_envs
        check_methods(id, env, "reset", "step")
        check_spaces(id, env, "observation_space", "action_space")
        self.spaces = env.observation_space, env.action_space
        self._read, self._codec = ObservationReader(self.spaces[0], id), ActionCodec.of(self.spaces[1], id)
        self.layout, self.actions = self._read.layout, self._codec.spec
        begin, advance = jax.vmap(env.reset), jax.vmap(env.step)

        def reset(keys: Raw) -> Raw:
            keys = jax.vmap(jax.random.split)(keys)
            obs, state = begin(keys[:, 0])
            return obs, (keys[:, 1], jnp.zeros(num_envs, jnp.int32), state)

        def step(carried: Raw, actions: Raw) -> Raw:
            keys, steps, state = carried
            keys = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
            last, after, reward, terminated, truncated = advance(keys[:, 0], state, actions)
            steps = steps + 1
            truncated = truncated | (steps >= (max_episode_steps or np.iinfo(np.int32).max))
            ended = terminated | truncated
            first, fresh = begin(keys[:, 1])

            def choose(new: Raw, old: Raw) -> Raw:
                return jnp.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            obs, state = jax.tree.map(choose, (first, fresh), (last, after))
            carried = keys[:, 2], jnp.where(ended, 0, steps), state
            return carried, obs, last, reward, terminated, truncated

        def rollout(activation: str, policy: PolicyArrays, noise: Raw, obs: Raw, carried: Raw) -> Raw:
            def act_and_step(at: Raw, noise: Raw) -> Raw:
                carried, row = at
                actions = _act(ACTIVATIONS[activation], policy, row, noise)
                carried, obs, last, *scored = step(carried, self._in_space(actions))
                row, last = (_row(each, num_envs) for each in (obs, last))
                return (carried, row), (row, actions, *scored, last)

            (carried, _), played = jax.lax.scan(act_and_step, (carried, obs), noise)
            return carried, [jnp.swapaxes(column, 0, 1) for column in played]

        self._reset, self._step = jax.jit(reset), jax.jit(step)
        self._rollout = jax.jit(rollout, static_argnums=0)
        self._carried: Raw = None

    def reset(self, seed: int) -> Observation:
        keys = jax.vmap(jax.random.PRNGKey)(np.arange(seed, seed + self.num_envs) % 2**31)
        obs, self._carried = self._reset(keys)
        return self._observe(obs)

    def step(self, actions: Array) -> EnvStep:
        self._carried, obs, last, reward, terminated, truncated = self._step(self._carried, self._codec.decode(actions))
        ends = read_flags(terminated, "`terminated`", self.id, self.num_envs)
        cuts = read_flags(truncated, "`truncated`", self.id, self.num_envs)
        final_obs = self._observe(last) if (ends | cuts).any() else None
        return EnvStep(
            self._observe(obs), read_rewards(reward, self.id, self.num_envs), ends, cuts, final_obs=final_obs
        )

    @property
    def rollout(self) -> Rollout | None:
        """A function for rollouts in one compiled call; None if observations or actions are not one flat vector."""
        numbers = [(part.kind, part.choices) for part in self.layout] == [("vector", ())]
        return self._play if numbers and isinstance(self.spaces[1], spaces.Box | spaces.Discrete) else None

    def _play(self, policy: PolicyArrays, noise: Floats, rows: RolloutRows) -> None:
        arrays = policy._replace(activation=None)
        self._carried, played = self._rollout(policy.activation, arrays, noise, rows.obs[:, 0], self._carried)
        obs, actions, rewards, terminated, truncated, last = map(np.asarray, played)
        read_rewards(rewards[:, 0], self.id, self.num_envs)
        for flags, name in ((terminated, "`terminated`"), (truncated, "`truncated`")):
            read_flags(flags[:, 0], name, self.id, self.num_envs)
        rows.obs[:, 1:], rows.actions[:], rows.rewards[:], rows.last_obs[:] = obs, actions, rewards, last
        rows.terminated[:], rows.truncated[:] = terminated, truncated

    def _in_space(self, actions: Raw) -> Raw:
        """Implement `ActionCodec.decode` for a Box or a Discrete space in JAX."""
        space: Raw = self.spaces[1]
        if isinstance(space, spaces.Discrete):
            return actions[:, 0] + space.start
        return jnp.clip(actions.reshape(-1, *space.shape), space.low, space.high).astype(space.dtype)

    def get_state(self) -> EnvState:
        return EnvState(jax.tree.map(np.asarray, self._carried))

    def set_state(self, data: Saved) -> None:
        self._carried = data

    def close(self) -> None:
        pass

    def _observe(self, raw: Raw) -> Observation:
        return copied(self._read.read_all(jax.tree.map(np.asarray, raw), self.num_envs))


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "elu": jax.nn.elu}


def _act(activation: Callable[[Raw], Raw], policy: PolicyArrays, row: Raw, noise: Raw) -> Raw:
    """Implement `tether.control.policies.networks.Actor` in JAX."""
    x = jnp.clip((row - policy.shift) * policy.scale, -policy.clip, policy.clip)
    for weight, bias in zip(policy.weights[:-1], policy.biases[:-1], strict=True):
        x = activation(x @ weight + bias)
    outputs = x @ policy.weights[-1] + policy.biases[-1]
    return outputs + noise * policy.std if policy.std.size else (outputs + noise).argmax(1, keepdims=True)


def _row(obs: Raw, num_envs: int) -> Raw:
    """Return the single array of an observation as rows [N, O]."""
    return jax.tree.leaves(obs)[0].reshape(num_envs, -1).astype(jnp.float32)
