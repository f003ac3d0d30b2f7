"""How a policy acts: its actor as plain arrays, since for a few rows a tensor's bookkeeping is most of a forward pass.

A simulator gives arrays and takes arrays, a handful of rows at a time. `Actor` computes what `ControlPolicy` computes,
up to rounding; log-probabilities and values are not needed for acting and come from the networks themselves, over a
whole rollout at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tether.models.control.heads import CategoricalHead, GaussianHead

if TYPE_CHECKING:
    from tether.models.control.policy import ControlPolicy

Array = NDArray[np.float32]


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": np.tanh, "relu": _relu, "elu": _elu}


class Actor:
    """A policy's choice of actions, with the weights of this moment; make a new one after an update.

    Args:
        policy: on any device.
    """

    def __init__(self, policy: ControlPolicy) -> None:
        self._layers = [(_array(weight).T, _array(bias)) for weight, bias in policy.actor.linear]
        self._activation = ACTIVATIONS[policy.spec.activation]
        self._choices = policy.head.choices if isinstance(policy.head, CategoricalHead) else None
        self._std = np.exp(_array(policy.head.logstd)) if isinstance(policy.head, GaussianHead) else None
        normalizer = policy.normalizer
        self._normalize = None
        if normalizer is not None:
            self._normalize = (_array(normalizer.shift), _array(normalizer.scale), normalizer.clip)

    def __call__(self, obs: Array, noise: Array | None) -> NDArray[Any]:
        """Choose the actions of a chunk, [N, K * D].

        Args:
            obs: [N, O], as the environments gave them.
            noise: [N, outputs], rows of the head's ``noise``; None takes the likeliest actions.
        """
        outputs = self._outputs(obs)
        if self._std is not None:
            return outputs if noise is None else outputs + noise * self._std
        scores = outputs if noise is None else outputs + noise
        assert self._choices is not None
        if len(self._choices) == 1:
            return scores.argmax(axis=1, keepdims=True)
        parts = np.split(scores, np.cumsum(self._choices)[:-1], axis=1)
        return np.stack([part.argmax(axis=1) for part in parts], axis=1)

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


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
