"""A multi-layer perceptron whose backward pass is scheduled by hand.

For networks this small, autograd's overhead takes several times as long as the arithmetic. `Mlp.backward` runs the same
chain rule in a fixed order, directly into the gradient buffers; a test compares it with autograd in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FloatArray: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Activation:
    """A nonlinearity whose derivative is a function of its output."""

    apply: Callable[[Tensor], Tensor]
    apply_array: Callable[[FloatArray], FloatArray]
    """The function in NumPy."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, output) -> gradient of the input."""
    gain: float
    """Scale of an orthogonal weight that preserves the variance."""


def _tanh(x: Tensor) -> Tensor:
    """Compute tanh, with NumPy on a CPU without gradients, where it takes a seventh of PyTorch's time."""
    if x.requires_grad or x.device.type != "cpu":
        return torch.tanh(x)
    return torch.from_numpy(np.tanh(x.numpy()))


def _relu(x: FloatArray) -> FloatArray:
    return np.maximum(x, 0.0)


def _elu(x: FloatArray) -> FloatArray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _tanh_backward(grad: Tensor, out: Tensor) -> Tensor:
    return torch.addcmul(grad, grad * out, out, value=-1)


def _relu_backward(grad: Tensor, out: Tensor) -> Tensor:
    return grad * (out > 0)


def _elu_backward(grad: Tensor, out: Tensor) -> Tensor:
    return torch.where(out > 0, grad, grad * (out + 1))


ACTIVATIONS = {  # named functions, so that a policy can be pickled
    "tanh": Activation(_tanh, np.tanh, _tanh_backward, math.sqrt(2)),
    "relu": Activation(torch.relu, _relu, _relu_backward, math.sqrt(2)),
    "elu": Activation(nn.functional.elu, _elu, _elu_backward, math.sqrt(2)),
}


def as_array(tensor: Tensor) -> FloatArray:
    """Return the numbers of a tensor, sharing its memory on the CPU."""
    return tensor.detach().cpu().numpy()


def orthogonal_linear(in_features: int, out_features: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with orthogonal initialisation (Saxe et al. 2014) scaled by `gain`, and a bias of 0."""
    layer = nn.Linear(in_features, out_features)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def layers_in_numpy(
    layers: Iterable[tuple[Tensor, Tensor]], activation: Activation
) -> Callable[[FloatArray], FloatArray]:
    """Return linear layers with a nonlinearity after each, in NumPy with the current weights and biases."""
    arrays = [(as_array(weight).T, as_array(bias)) for weight, bias in layers]

    def forward(x: FloatArray) -> FloatArray:
        for weight, bias in arrays:
            x = x @ weight
            x += bias
            x = activation.apply_array(x)
        return x

    return forward


class Mlp(nn.Module):
    """Linear layers with a nonlinearity between them.

    Args:
        sizes: width of the input, of each hidden layer and of the output.
        activation: one of `ACTIVATIONS`.
        output_gain: scale of the last layer's initialisation; small for a policy, so that it starts close to uniform.
        generator: random generator of the initialisation.
    """

    def __init__(self, sizes: list[int], activation: str, output_gain: float, generator: torch.Generator) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        gains = [self.activation.gain] * (len(sizes) - 2) + [output_gain]
        layers = [orthogonal_linear(*pair, gain, generator) for pair, gain in zip(pairwise(sizes), gains, strict=True)]
        self.layers = nn.ModuleList(layers)
        # Cached, because attribute access of a module is slow and an update needs them many times.
        self.linear: list[tuple[Tensor, Tensor]] = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, last size] for [B, first size]."""
        return self.activations(x)[-1]

    def in_numpy(self) -> Callable[[FloatArray], FloatArray]:
        """Return `forward` in NumPy with the current weights.

        A simulator steps few rows at a time, for which the overhead of tensors dominates a forward pass.
        """
        *hidden, last = self.linear
        before = layers_in_numpy(hidden, self.activation)
        weight, bias = as_array(last[0]).T, as_array(last[1])
        return lambda x: before(x) @ weight + bias

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the input, the output of each hidden layer after its nonlinearity, and the output."""
        passed = [x]
        last = len(self.linear) - 1
        for index, (weight, bias) in enumerate(self.linear):
            x = torch.addmm(bias, x, weight.t())
            if index < last:
                x = self.activation.apply(x)
            passed.append(x)
        return passed

    def backward(
        self, passed: list[Tensor], grad: Tensor, hidden_grad: Tensor | None = None, *, add: bool = False
    ) -> None:
        """Write the gradient of every parameter into its existing ``grad``.

        Args:
            passed: result of `activations`.
            grad: gradient of the output, [B, last size].
            hidden_grad: further gradient of the last hidden layer, from other modules that read it.
            add: add to the existing gradients instead of overwriting them.
        """
        for index, (weight, bias) in reversed(list(enumerate(self.linear))):
            if add:
                assert weight.grad is not None
                assert bias.grad is not None
                weight.grad.addmm_(grad.t(), passed[index])
                bias.grad.add_(grad.sum(0))
            else:
                torch.mm(grad.t(), passed[index], out=weight.grad)
                torch.sum(grad, 0, out=bias.grad)
            if index > 0:
                grad = torch.mm(grad, weight)
                if hidden_grad is not None:
                    grad, hidden_grad = grad + hidden_grad, None
                grad = self.activation.backward(grad, passed[index])
