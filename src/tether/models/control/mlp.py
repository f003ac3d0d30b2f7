"""A multi-layer perceptron whose backward pass is scheduled by hand.

For networks this small autograd's bookkeeping takes several times as long as the arithmetic. `Mlp.backward` runs the
same chain rule in a fixed order, straight into the gradient buffers; a test holds it to autograd in float64.
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
    """A nonlinearity whose derivative follows from its own output."""

    apply: Callable[[Tensor], Tensor]
    of_array: Callable[[FloatArray], FloatArray]
    """The same in NumPy."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, output) -> gradient of the input."""
    gain: float
    """Scale of an orthogonal weight that keeps the variance of what passes through."""


def _tanh(x: Tensor) -> Tensor:
    """On a CPU by NumPy, where nothing is differentiated: it takes a seventh of PyTorch's time."""
    if x.requires_grad or x.device.type != "cpu":
        return torch.tanh(x)
    return torch.from_numpy(np.tanh(x.numpy()))


def _relu(x: FloatArray) -> FloatArray:
    return np.maximum(x, 0.0)


def _elu(x: FloatArray) -> FloatArray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _of_tanh(grad: Tensor, out: Tensor) -> Tensor:
    return torch.addcmul(grad, grad * out, out, value=-1)


def _of_relu(grad: Tensor, out: Tensor) -> Tensor:
    return grad * (out > 0)


def _of_elu(grad: Tensor, out: Tensor) -> Tensor:
    return torch.where(out > 0, grad, grad * (out + 1))


ACTIVATIONS = {  # of named functions: a policy can be pickled
    "tanh": Activation(_tanh, np.tanh, _of_tanh, math.sqrt(2)),
    "relu": Activation(torch.relu, _relu, _of_relu, math.sqrt(2)),
    "elu": Activation(nn.functional.elu, _elu, _of_elu, math.sqrt(2)),
}


def as_array(tensor: Tensor) -> FloatArray:
    """The numbers of a tensor, in the same memory where that is the CPU's."""
    return tensor.detach().cpu().numpy()


def orthogonal_linear(sees: int, gives: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer with an orthogonal start (Saxe et al. 2014) scaled by `gain`, and a bias of 0."""
    layer = nn.Linear(sees, gives)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def layers_in_numpy(
    layers: Iterable[tuple[Tensor, Tensor]], activation: Activation
) -> Callable[[FloatArray], FloatArray]:
    """Linear layers, each with the nonlinearity after it, in NumPy, with the weights and biases of this moment."""
    arrays = [(as_array(weight).T, as_array(bias)) for weight, bias in layers]

    def forward(x: FloatArray) -> FloatArray:
        for weight, bias in arrays:
            x = x @ weight
            x += bias
            x = activation.of_array(x)
        return x

    return forward


class Mlp(nn.Module):
    """Linear layers with a nonlinearity between them.

    Args:
        sizes: width of the input, of each hidden layer and of the output.
        activation: one of `ACTIVATIONS`.
        output_gain: scale of the last layer's orthogonal start; small for a policy, so that it begins undecided.
        generator: of the start.
    """

    def __init__(self, sizes: list[int], activation: str, output_gain: float, generator: torch.Generator) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        gains = [self.activation.gain] * (len(sizes) - 2) + [output_gain]
        layers = [orthogonal_linear(*pair, gain, generator) for pair, gain in zip(pairwise(sizes), gains, strict=True)]
        self.layers = nn.ModuleList(layers)
        # Looked up once: a module's attributes are slow to reach, and an update reaches them many times.
        self.linear: list[tuple[Tensor, Tensor]] = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """[B, first size] -> [B, last size]."""
        return self.activations(x)[-1]

    def in_numpy(self) -> Callable[[FloatArray], FloatArray]:
        """`forward` in NumPy, with the weights of this moment.

        A simulator steps a handful of rows at a time, for which a tensor's bookkeeping is most of a forward pass.
        """
        *hidden, last = self.linear
        before = layers_in_numpy(hidden, self.activation)
        weight, bias = as_array(last[0]).T, as_array(last[1])
        return lambda x: before(x) @ weight + bias

    def activations(self, x: Tensor) -> list[Tensor]:
        """The input, the output of each hidden layer after its nonlinearity, and the output."""
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
            passed: what `activations` gave.
            grad: gradient of the output, [B, last size].
            hidden_grad: further gradient of the last hidden layer, from what else reads it.
            add: to what is there, instead of over it.
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
