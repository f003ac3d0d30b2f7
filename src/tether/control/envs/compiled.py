"""A policy in numba, for compiled rollouts (`tether.control.envs.protocol.Rollout`)."""

from __future__ import annotations

import numba
import numpy as np

from tether.control.envs.protocol import Floats, PolicyArrays
from tether.observations import Array


@numba.njit(cache=True)
def choose_actions(policy: PolicyArrays, obs: Floats, noise: Floats, actions: Array) -> None:
    """Write the actions [N, D] of observations [N, O], with the head's noise [N, outputs]."""
    x = np.minimum(np.maximum((obs - policy.shift) * policy.scale, -policy.clip), policy.clip)
    for layer in range(len(policy.weights)):
        x = np.dot(x, policy.weights[layer]) + policy.biases[layer]
        if layer + 1 < len(policy.weights):
            if policy.activation == "tanh":
                x = np.tanh(x)
            elif policy.activation == "relu":
                x = np.maximum(x, np.float32(0))
            else:
                x = np.where(x > 0, x, np.expm1(np.minimum(x, np.float32(0))))
    if len(policy.std):
        actions[:] = x + noise * policy.std
    else:
        x += noise
        for row in range(len(x)):
            actions[row, 0] = np.argmax(x[row])
