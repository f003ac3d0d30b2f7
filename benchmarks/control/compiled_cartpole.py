"""CartPole as Gymnasium has it, compiled: by numba with a `rollout` of its own, and in JAX.

    tether train env.train.id=benchmarks/control/compiled_cartpole.py:CartPole
    tether train env.train.id=benchmarks/control/compiled_cartpole.py:JaxCartPole env.train.env_type=jax \\
        env.train.max_episode_steps=500
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from benchmarks.control.cartpole_steps import ANGLE, BOUND, advance, play
from tether.control.envs.protocol import Floats, PolicyArrays, RolloutRows
from tether.observations import Array

OBSERVATIONS = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)


class CartPole(VectorEnv[Any, Any, Any]):
    """N of them in numba."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.rng = num_envs, np.random.default_rng()
        self.single_observation_space, self.single_action_space = OBSERVATIONS, gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        """Begin new episodes."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.state = self.rng.uniform(-0.05, 0.05, (self.num_envs, 4))
        self.steps = np.zeros(self.num_envs, np.int64)
        return self.state.astype(np.float32), {}

    def step(self, actions: Array) -> tuple[Any, Any, Any, Any, Any]:
        """Carry out one step."""
        rewards, last = np.zeros(self.num_envs, np.float32), np.zeros((self.num_envs, 4), np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        advance(self.state, self.steps, self.rng, actions, rewards, terminated, truncated, last)
        info = {"final_obs": last} if (terminated | truncated).any() else {}
        return self.state.astype(np.float32), rewards, terminated, truncated, info

    def rollout(self, policy: PolicyArrays, noise: Floats, rows: RolloutRows) -> None:
        """Carry out all steps of a rollout."""
        play(self.state, self.steps, self.rng, policy, noise, rows)


class JaxCartPole:
    """One of them in JAX."""

    observation_space, action_space = OBSERVATIONS, gymnasium.spaces.Discrete(2)

    def reset(self, key: Any) -> tuple[Any, Any]:
        """Begin an episode."""
        import jax

        state = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return state, state

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Carry out one step."""
        from jax import numpy as jnp

        x, speed, angle, turn = state
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        pushed = (20.0 * action - 10.0 + 0.05 * turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        speeds = speed + 0.02 * (pushed - 0.05 * turning * cos / 1.1), turn + 0.02 * turning
        state = jnp.stack([x + 0.02 * speed, speeds[0], angle + 0.02 * turn, speeds[1]])
        return state, state, 1.0, (jnp.abs(state[0]) > BOUND) | (jnp.abs(state[2]) > ANGLE), False
