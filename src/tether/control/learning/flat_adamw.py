"""All parameters of a small network in one buffer, and AdamW over it, with a handful of kernels per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from tether.types import StateDict


class FlatParameters:
    """Moves all parameters into one vector and their gradients into another, and makes them views of these.

    Args:
        groups: the parameters, grouped by learning rate.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        parameters = [parameter for group in groups for parameter in group]
        self.values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.grads = torch.zeros_like(self.values)
        offset = 0
        for parameter in parameters:
            span = slice(offset, offset + parameter.numel())
            parameter.data = self.values[span].view_as(parameter)
            parameter.grad = self.grads[span].view_as(parameter)
            offset = span.stop
        sizes = [sum(parameter.numel() for parameter in group) for group in groups]
        bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self.slices = [slice(start, stop) for start, stop in pairwise(bounds)]


class FlatAdamW:
    """AdamW (Loshchilov and Hutter 2019) over `FlatParameters`, equal to ``torch.optim.AdamW``.

    Args:
        parameters: the parameters to train.
        betas: decay rates of the first and second moment.
        eps: term in the denominator.
        weight_decay: the decoupled weight decay.
    """

    def __init__(
        self, parameters: FlatParameters, *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.parameters = parameters
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._first = torch.zeros_like(parameters.values)
        self._second = torch.zeros_like(parameters.values)
        self._denominator = torch.zeros_like(parameters.values)
        self._steps = 0

    def clip_(self, max_norm: float) -> float:
        """Scale all gradients down to a norm of at most `max_norm`, and return the norm before."""
        norm = float(torch.linalg.vector_norm(self.parameters.grads))
        if norm > max_norm:
            self.parameters.grads.mul_(max_norm / (norm + 1e-6))
        return norm

    def step(self, rates: Sequence[float]) -> None:
        """Update the parameters from the gradients, with a learning rate for each group."""
        self._steps += 1
        (beta1, beta2), grads, values = self._betas, self.parameters.grads, self.parameters.values
        self._first.lerp_(grads, 1 - beta1)
        self._second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        torch.sqrt(self._second, out=self._denominator)
        self._denominator.mul_((1 - beta2**self._steps) ** -0.5).add_(self._eps)
        for span, rate in self._spans(rates):
            if self._weight_decay:
                values[span].mul_(1 - rate * self._weight_decay)
            values[span].addcdiv_(self._first[span], self._denominator[span], value=-rate / (1 - beta1**self._steps))

    def state_dict(self) -> StateDict:
        """Return the moments and the number of steps."""
        return {"first": self._first.clone(), "second": self._second.clone(), "steps": self._steps}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the result of `state_dict`."""
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])
        self._steps = int(state["steps"])

    def _spans(self, rates: Sequence[float]) -> list[tuple[slice, float]]:
        if len(set(rates)) == 1:
            return [(slice(None), rates[0])]
        return list(zip(self.parameters.slices, rates, strict=True))
