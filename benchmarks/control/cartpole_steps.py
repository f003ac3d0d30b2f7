"""CartPole's steps in numba, in a module of their own: numba's cache remembers its name."""

from __future__ import annotations

import math

import numba
import numpy as np

from tether.control.envs.compiled import choose_actions
from tether.control.envs.protocol import Flags, Floats, PolicyArrays, RolloutRows
from tether.observations import Array

BOUND, ANGLE, LIMIT = 2.4, 12 * 2 * math.pi / 360, 500


@numba.njit(cache=True)
def advance(
    state: Floats, steps: Array, rng: np.random.Generator, actions: Array, rewards: Floats, terminated: Flags,
    truncated: Flags, last: Floats,
) -> None:  # fmt: skip
    """Carry out a step of all environments, in place."""
    for i in range(len(state)):
        x, speed, angle, turn = state[i]
        force = 10.0 if actions[i] == 1 else -10.0
        cos, sin = math.cos(angle), math.sin(angle)
        pushed = (force + 0.05 * turn * turn * sin) / 1.1
        turning = (9.8 * sin - cos * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        state[i, 0], state[i, 2] = x + 0.02 * speed, angle + 0.02 * turn
        state[i, 1] = speed + 0.02 * (pushed - 0.05 * turning * cos / 1.1)
        state[i, 3] = turn + 0.02 * turning
        steps[i] += 1
        last[i], rewards[i] = state[i], 1.0
        terminated[i] = abs(state[i, 0]) > BOUND or abs(state[i, 2]) > ANGLE
        truncated[i] = steps[i] == LIMIT
        if terminated[i] or truncated[i]:
            steps[i] = 0
            for k in range(4):
                state[i, k] = rng.uniform(-0.05, 0.05)


@numba.njit(cache=True)
def play(
    state: Floats, steps: Array, rng: np.random.Generator, policy: PolicyArrays, noise: Floats, rows: RolloutRows
) -> None:
    """Carry out a rollout."""
    for t in range(len(noise)):
        actions = rows.actions[:, t]
        choose_actions(policy, rows.obs[:, t], noise[t], actions)
        ends = rows.terminated[:, t], rows.truncated[:, t]
        advance(state, steps, rng, actions[:, 0], rows.rewards[:, t], *ends, rows.last_obs[:, t])
        rows.obs[:, t + 1] = state
