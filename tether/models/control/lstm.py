"""An LSTM over sequences in which episodes end and begin."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Lstm(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    Its state is output and cell side by side, S = 2 size. One matrix product serves the inputs of all steps; what is
    left to do step by step is small.

    Args:
        sees: entries of an input.
        size: entries of an output.
        generator: of the orthogonal start.
    """

    def __init__(self, sees: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size = size
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
            state: [M, S]: before the first step.
        """
        anywhere = [False] * x.shape[1] if starts is None else starts.any(dim=0).tolist()
        states = []
        # unbind, not an index a step: the gradient of an index is a tensor of the size of all steps.
        for t, from_input in enumerate(self.inputs(x).unbind(dim=1)):
            if starts is not None and anywhere[t]:
                state = torch.where(starts[:, t, None], 0.0, state)
            output, cell = state.chunk(2, dim=1)
            keep, write, candidate, read = (from_input + self.recurrent(output)).chunk(4, dim=1)
            cell = keep.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            state = torch.cat([read.sigmoid() * cell.tanh(), cell], dim=1)
            states.append(state)
        return torch.stack(states, dim=1)
