"""How a policy acts.

A simulator gives arrays and takes arrays, a handful of rows at a time, for which a tensor's bookkeeping is most of a
forward pass. So `Actor` computes what a `ControlPolicy` computes in plain arrays, up to rounding. `NetworkActor` asks a
`NetworkPolicy`, whose own arithmetic takes longer. Log-probabilities and values are not needed for acting, and come
from the networks over a whole rollout at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tether.models.control.heads import CategoricalHead, GaussianHead, Head
from tether.observations import Observation

if TYPE_CHECKING:
    from tether.models.control.mlp_policy import ControlPolicy
    from tether.models.control.network_policy import NetworkPolicy

Array = NDArray[np.float32]

Act = Callable[[Observation, Array | None, Array], tuple[NDArray[Any], Array]]
"""(observations of N environments; noise [N, outputs] of the head, or None for the
likeliest actions; states [N, S] of the memory) -> actions of a chunk [N, K * D], next states."""


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": np.tanh, "relu": _relu, "elu": _elu}


class Choice:
    """From outputs to actions, with the weights of this moment."""

    def __init__(self, head: Head) -> None:
        self._choices = head.choices if isinstance(head, CategoricalHead) else None
        self._std = np.exp(_array(head.logstd)) if isinstance(head, GaussianHead) else None

    def __call__(self, outputs: Array, noise: Array | None) -> NDArray[Any]:
        """[N, outputs], and noise of the same shape -> [N, K * D]."""
        if self._std is not None:
            return outputs if noise is None else outputs + noise * self._std
        scores = outputs if noise is None else outputs + noise
        assert self._choices is not None
        if len(self._choices) == 1:
            return scores.argmax(axis=1, keepdims=True)
        parts = np.split(scores, np.cumsum(self._choices)[:-1], axis=1)
        return np.stack([part.argmax(axis=1) for part in parts], axis=1)


class Actor:
    """The `Act` of perceptrons, with the weights of this moment; make a new one after an update.

    Args:
        policy: on any device.
    """

    def __init__(self, policy: ControlPolicy) -> None:
        self._layers = [(_array(weight).T, _array(bias)) for weight, bias in policy.actor.linear]
        self._activation = ACTIVATIONS[policy.spec.activation]
        self._choose = Choice(policy.head)
        self._row = policy.row
        normalizer = policy.normalizer
        self._normalize = None
        if normalizer is not None:
            self._normalize = (_array(normalizer.shift), _array(normalizer.scale), normalizer.clip)

    def __call__(self, obs: Observation, noise: Array | None, state: Array) -> tuple[NDArray[Any], Array]:
        """See `Act`."""
        name = self._row.is_part
        row = self._row(as_tensors(obs)).numpy() if name is None else obs[name]
        return self._choose(self._outputs(row), noise), state

    def _outputs(self, x: Array) -> Array:
        if self._normalize is not None:
            shift, scale, clip = self._normalize
            x = np.minimum(np.maximum((x - shift) * scale, -clip), clip)
        last = len(self._layers) - 1
        for index, (weight, bias) in enumerate(self._layers):
            x = x @ weight
            x += bias
            if index < last:
                x = self._activation(x)
        return x


class NetworkActor:
    """The `Act` of networks; make a new one after an update.

    Args:
        policy: on the CPU.
    """

    def __init__(self, policy: NetworkPolicy) -> None:
        self._policy = policy
        self._choose = Choice(policy.head)

    def __call__(self, obs: Observation, noise: Array | None, state: Array) -> tuple[NDArray[Any], Array]:
        """See `Act`."""
        outputs, after = self._policy.act(self._policy.inputs(as_tensors(obs)), torch.from_numpy(state))
        return self._choose(outputs.numpy(), noise), after.numpy()


def as_tensors(obs: Observation) -> dict[str, Tensor]:
    """The same parts, in the same memory."""
    return {name: torch.from_numpy(part) for name, part in obs.items()}


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
