"""Actors: fast inference of control policies.

`Actor` computes in NumPy what the networks compute, up to rounding. `NetworkActor` calls the networks, where their
arithmetic takes longer than the overhead of tensors. Log-probabilities and values are not needed for acting; the
networks compute them later for a full rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tether.control.policies.networks import CategoricalHead, FloatArray, Head, StateDependentHead, as_array
from tether.control.policies.spec import FORBIDDEN, device_of
from tether.observations import ACTION_MASK, Array, Observation

if TYPE_CHECKING:
    from tether.control.policies.mlp_policy import ControlPolicy
    from tether.control.policies.network_policy import NetworkPolicy

Act = Callable[[Observation, FloatArray | None, FloatArray], tuple[Array, FloatArray]]
"""(observations of N environments; noise [N, ...] of the head, or None for the most likely actions; recurrent states
[N, S]) -> actions of a chunk [N, K * D], next states."""

Forward = Callable[[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]
"""(normalised rows [N, O], states [N, S]) -> outputs [N, outputs] of the head before masks, next states."""


class Choice:
    """Chooses actions from outputs, with the weights at the time of construction."""

    def __init__(self, head: Head) -> None:
        self._choices = head.choices if isinstance(head, CategoricalHead) else None
        self._std: FloatArray | None = None if isinstance(head, CategoricalHead) else np.exp(as_array(head.logstd))
        self._means = head.width if isinstance(head, StateDependentHead) else None

    def __call__(self, outputs: FloatArray, noise: FloatArray | None) -> Array:
        """Return actions [N, K * D] for outputs [N, outputs] and the head's noise for N observations."""
        if self._means is not None:
            means, features = np.split(outputs, [self._means], axis=1)
            if noise is None:
                return means
            assert self._std is not None
            matrices = noise.reshape(len(noise), features.shape[1], self._means) * self._std
            return means + (features[:, None] @ matrices)[:, 0]
        if self._std is not None:
            return outputs if noise is None else outputs + noise * self._std
        scores = outputs if noise is None else outputs + noise
        assert self._choices is not None
        if len(self._choices) == 1:
            return scores.argmax(axis=1, keepdims=True)
        by_choice = np.split(scores, np.cumsum(self._choices)[:-1], axis=1)
        return np.stack([choice.argmax(axis=1) for choice in by_choice], axis=1)


class Actor:
    """The `Act` of networks that read numbers, with the weights at construction; create a new one after an update.

    Args:
        policy: a policy on any device.
    """

    def __init__(self, policy: ControlPolicy | NetworkPolicy) -> None:
        self._row, self._forward = policy.row, policy.in_numpy()
        self._normalize = None if policy.normalizer is None else policy.normalizer.in_numpy()
        self._choose = Choice(policy.head)
        self._has_mask = policy.spec.has_mask

    def __call__(self, obs: Observation, noise: FloatArray | None, state: FloatArray) -> tuple[Array, FloatArray]:
        name = self._row.single_field
        row = self._row(as_tensors(obs)).numpy() if name is None else obs[name]
        if self._normalize is not None:
            row = self._normalize(row)
        outputs, state = self._forward(row, state)
        if self._has_mask:
            outputs = np.where(obs[ACTION_MASK], outputs, np.float32(FORBIDDEN))
        return self._choose(outputs, noise), state


class NetworkActor:
    """The `Act` of networks that read images, or of user-defined ones; create a new one after an update.

    Args:
        policy: a policy on any device.
    """

    def __init__(self, policy: NetworkPolicy) -> None:
        self._policy, self._device = policy, device_of(policy)
        self._choose = Choice(policy.head)

    def __call__(self, obs: Observation, noise: FloatArray | None, state: FloatArray) -> tuple[Array, FloatArray]:
        inputs = self._policy.inputs(as_tensors(obs, self._device))
        outputs, after = self._policy.act(inputs, torch.from_numpy(state).to(self._device))
        return self._choose(outputs.cpu().numpy(), noise), after.cpu().numpy()


def as_tensors(obs: Observation, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the fields as tensors on a device; on the CPU, the default, they share the memory."""
    return {name: torch.from_numpy(array).to(device or "cpu") for name, array in obs.items()}
