"""An LSTM over sequences in which episodes end and begin, with its backward pass by hand.

Its steps are small and many, so that autograd's bookkeeping would take several times as long as their arithmetic. What
does not depend on the step before is computed for all steps at once: the products with the inputs, and in the backward
pass all slopes and the gradient of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Lstm(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    Its state is output and cell side by side, S = 2 size.

    Args:
        sees: entries of an input.
        size: entries of an output.
        generator: of the orthogonal start.
    """

    def __init__(self, sees: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inputs = nn.Linear(sees, 4 * size)
        self.recurrent = nn.Linear(size, 4 * size, bias=False)
        for layer in (self.inputs, self.recurrent):
            nn.init.orthogonal_(layer.weight, generator=generator)
        nn.init.zeros_(self.inputs.bias)

    def forward(self, x: Tensor, starts: Tensor | None, state: Tensor) -> Tensor:
        """States [M, C, S] after each step; the first half of one is the output.

        Args:
            x: [M, C, sees]
            starts: [M, C]: steps before which the state is set to zero; None: none.
            state: [M, S]: before the first step; a constant.
        """
        starts = torch.zeros(x.shape[:2], dtype=torch.bool) if starts is None else starts
        states: Tensor = _Steps.apply(self.inputs(x).transpose(0, 1), self.recurrent.weight, starts.T, state)
        return states.transpose(0, 1)


class _Steps(torch.autograd.Function):
    """With the gates r (read), k (keep), w (write) and the candidate a, each of which sees the input and the output h
    before: c' = k c + w a and h' = r tanh(c')."""

    @staticmethod
    def forward(ctx: Any, from_input: Tensor, weight: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """[C, M, 4 size], [4 size, size], [C, M], [M, S] -> states [C, M, S]."""
        size = weight.shape[1]
        gates = from_input.clone(memory_format=torch.contiguous_format)
        before, states = gates.new_empty(*gates.shape[:2], 2 * size), gates.new_empty(*gates.shape[:2], 2 * size)
        begins = starts.any(dim=1).tolist()
        for t, gate in enumerate(gates):
            before[t] = state.masked_fill(starts[t, :, None], 0.0) if begins[t] else state
            output, cell = before[t].split(size, dim=1)
            gate.addmm_(output, weight.t())
            gate[:, : 3 * size].sigmoid_()
            gate[:, 3 * size :].tanh_()
            read, keep, write, candidate = gate.split(size, dim=1)
            state = states[t]
            next_output, next_cell = state.split(size, dim=1)
            torch.mul(keep, cell, out=next_cell).addcmul_(write, candidate)
            torch.tanh(next_cell, out=next_output).mul_(read)
        ctx.save_for_backward(gates, before, states, weight, starts)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of the part of the input in the gates, and of the weight."""
        gates, before, states, weight, starts = ctx.saved_tensors
        size = weight.shape[1]
        read, keep, write, candidate = gates.split(size, dim=2)
        squashed = states[..., size:].tanh()
        # Slopes of the output by the new cell, of the output by the read gate, of the new cell by the others.
        by_cell = read * (1 - squashed.square())
        by_read = squashed * read * (1 - read)
        others = [
            before[..., size:] * keep * (1 - keep),
            candidate * write * (1 - write),
            write * (1 - candidate.square()),
        ]
        by_others = torch.stack(others, dim=2)
        found = torch.empty_like(gates)
        begins = starts.any(dim=1).tolist()
        after = torch.zeros_like(before[0])
        for t in range(len(gates) - 1, -1, -1):
            output_grad, cell_grad = (grad[t] + after).split(size, dim=1)
            cell_grad = torch.addcmul(cell_grad, output_grad, by_cell[t])
            torch.mul(output_grad, by_read[t], out=found[t, :, :size])
            torch.mul(cell_grad[:, None], by_others[t], out=found[t, :, size:].unflatten(1, (3, size)))
            torch.mm(found[t], weight, out=after[:, :size])
            torch.mul(cell_grad, keep[t], out=after[:, size:])
            if begins[t]:
                after.masked_fill_(starts[t, :, None], 0.0)
        weight_grad = found.flatten(0, 1).t() @ before[..., :size].flatten(0, 1)
        return found, weight_grad, None, None
