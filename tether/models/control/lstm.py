"""`torch.nn.LSTM` over sequences in which episodes end and begin.

Its state is output and cell side by side, S = 2 H. PyTorch runs whole sequences several times as fast as single steps,
but cannot reset a state inside one. So sequences are cut where an episode begins, and pieces of similar length, up to a
factor of two, are padded to one length and run together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonal_lstm(inputs: int, width: int, generator: torch.Generator) -> nn.LSTM:
    """An LSTM with orthogonal weights and zero biases."""
    lstm = nn.LSTM(inputs, width)
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)
    return lstm


def run_sequences(lstm: nn.LSTM, x: Tensor, starts: Tensor, state: Tensor) -> Tensor:
    """Outputs [M, C, H] of inputs [M, C, inputs], fast over long sequences.

    Args:
        lstm: of width H.
        x: M sequences of C steps.
        starts: [M, C]: steps before which the state is set to zero.
        state: [M, S]: before the first step; a constant.
    """
    begins = starts.clone()
    begins[:, 0] = True
    first = begins.flatten().nonzero()[:, 0]
    length = first.diff(append=first.new_tensor([starts.numel()]))
    before = state[first // starts.shape[1]].masked_fill(starts.flatten()[first, None], 0.0)
    rows, size = x.flatten(0, 1), length.double().log2().ceil()
    outputs, places = [], []
    for alike in (size == group for group in size.unique()):
        steps = torch.arange(int(length[alike].max()))[:, None]
        place, real = first[alike] + steps, steps < length[alike]
        hidden, cell = before[None, alike].split(lstm.hidden_size, dim=2)
        output, _ = lstm(rows[place.clamp(max=len(rows) - 1)], (hidden.contiguous(), cell.contiguous()))
        outputs.append(output[real])
        places.append(place[real])
    return torch.cat(outputs)[torch.cat(places).argsort()].unflatten(0, starts.shape)


def run_steps(lstm: nn.LSTM, x: Tensor, starts: Tensor | None, state: Tensor) -> Tensor:
    """States [M, C, S] after each step, of which the first half is the output; for the arguments see `run_sequences`.

    `torch.nn.LSTM` gives the cell of the last step only.
    """
    weights = [lstm.get_parameter(name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
    states = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None], 0.0)
        state = torch.cat(torch.lstm_cell(x[:, t], state.split(lstm.hidden_size, dim=1), *weights), dim=1)
        states.append(state)
    return torch.stack(states, dim=1)
