"""Acting with a policy.

`Actor` computes in NumPy, up to rounding, what the networks compute. `NetworkActor` asks the networks, where their own
arithmetic takes longer than a tensor's bookkeeping. Log-probabilities and values are not needed for acting, and
come from the networks over a whole rollout at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tether.models.control.heads import CategoricalHead, Head, StateDependentHead
from tether.models.control.mlp import FloatArray, as_array
from tether.models.control.spec import FORBIDDEN, device_of
from tether.observations import ACTION_MASK, Array, Observation

if TYPE_CHECKING:
    from tether.models.control.mlp_policy import ControlPolicy
    from tether.models.control.network_policy import NetworkPolicy

Act = Callable[[Observation, FloatArray | None, FloatArray], tuple[Array, FloatArray]]
"""(observations of N environments; noise [N, ...] of the head, or None for the likeliest actions; states [N, S] of
the memory) -> actions of a chunk [N, K * D], next states."""

Forward = Callable[[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]
"""(normalised rows [N, O], states [N, S]) -> outputs [N, outputs] of the head before masks, next states."""


class Choice:
    """From outputs to actions, with the weights of this moment."""

    def __init__(self, head: Head) -> None:
        self._choices = head.choices if isinstance(head, CategoricalHead) else None
        self._std: FloatArray | None = None if isinstance(head, CategoricalHead) else np.exp(as_array(head.logstd))
        self._means = head.width if isinstance(head, StateDependentHead) else None

    def __call__(self, outputs: FloatArray, noise: FloatArray | None) -> Array:
        """[N, outputs], and the head's noise for N observations -> [N, K * D]."""
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
        parts = np.split(scores, np.cumsum(self._choices)[:-1], axis=1)
        return np.stack([part.argmax(axis=1) for part in parts], axis=1)


class Actor:
    """The `Act` of networks that read numbers, with the weights of this moment; make a new one after an update.

    Args:
        policy: on any device.
    """

    def __init__(self, policy: ControlPolicy | NetworkPolicy) -> None:
        self._row, self._forward = policy.row, policy.in_numpy()
        self._normalize = None if policy.normalizer is None else policy.normalizer.in_numpy()
        self._choose = Choice(policy.head)
        self._has_mask = policy.spec.has_mask

    def __call__(self, obs: Observation, noise: FloatArray | None, state: FloatArray) -> tuple[Array, FloatArray]:
        """See `Act`."""
        name = self._row.is_part
        row = self._row(as_tensors(obs)).numpy() if name is None else obs[name]
        if self._normalize is not None:
            row = self._normalize(row)
        outputs, state = self._forward(row, state)
        if self._has_mask:
            outputs = np.where(obs[ACTION_MASK], outputs, np.float32(FORBIDDEN))
        return self._choose(outputs, noise), state


class NetworkActor:
    """The `Act` of networks that see pictures, or of the user's; make a new one after an update.

    Args:
        policy: on any device.
    """

    def __init__(self, policy: NetworkPolicy) -> None:
        self._policy, self._device = policy, device_of(policy)
        self._choose = Choice(policy.head)

    def __call__(self, obs: Observation, noise: FloatArray | None, state: FloatArray) -> tuple[Array, FloatArray]:
        """See `Act`."""
        inputs = self._policy.inputs(as_tensors(obs, self._device))
        outputs, after = self._policy.act(inputs, torch.from_numpy(state).to(self._device))
        return self._choose(outputs.cpu().numpy(), noise), after.cpu().numpy()


def as_tensors(obs: Observation, device: torch.device | None = None) -> dict[str, Tensor]:
    """The same parts, on a device; on the CPU, which is the default, in the same memory."""
    return {name: torch.from_numpy(part).to(device or "cpu") for name, part in obs.items()}
