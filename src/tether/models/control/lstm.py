"""`torch.nn.LSTM` over sequences in which episodes end and begin.

Its state is output and cell side by side, S = 2 H. PyTorch runs whole sequences several times as fast as single steps,
but cannot reset a state inside one. So sequences are cut where an episode begins, and pieces of similar length, up to a
factor of two, are padded to one length and run together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tether.models.control.mlp import FloatArray, as_array


def uniform_lstm(inputs: int, width: int, generator: torch.Generator) -> nn.LSTM:
    """An LSTM whose weights and biases begin uniform in ±width^-0.5, PyTorch's own start.

    In a maze with a cue it learns sooner than one with orthogonal weights and biases of 0.
    """
    lstm = nn.LSTM(inputs, width)
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5, generator=generator)
    return lstm


def in_numpy(lstm: nn.LSTM) -> Callable[[FloatArray, FloatArray], FloatArray]:
    """One step in NumPy, with the weights of this moment: inputs [N, inputs], states [N, S] -> states after it.

    With sigmoid(z) = (1 + tanh(z / 2)) / 2, one tanh serves all four gates.
    """
    width = lstm.hidden_size
    of_inputs, of_output, *biases = (as_array(weight) for weight in _weights(lstm))
    scale = np.repeat(np.asarray([0.5, 0.5, 1.0, 0.5], dtype=np.float32), width)
    of_inputs, of_output, bias = of_inputs.T * scale, of_output.T * scale, (biases[0] + biases[1]) * scale

    def step(x: FloatArray, state: FloatArray) -> FloatArray:
        gates = np.tanh(x @ of_inputs + state[:, :width] @ of_output + bias)
        enters, stays, shown = (0.5 + 0.5 * gates[:, at * width : (at + 1) * width] for at in (0, 1, 3))
        cell = stays * state[:, width:] + enters * gates[:, 2 * width : 3 * width]
        return np.concatenate([shown * np.tanh(cell), cell], axis=1)

    return step


def _weights(lstm: nn.LSTM) -> list[Tensor]:
    return [lstm.get_parameter(name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]


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
    weights = _weights(lstm)
    states = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None], 0.0)
        state = torch.cat(torch.lstm_cell(x[:, t], state.split(lstm.hidden_size, dim=1), *weights), dim=1)
        states.append(state)
    return torch.stack(states, dim=1)
