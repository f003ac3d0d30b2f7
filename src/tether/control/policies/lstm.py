"""`torch.nn.LSTM` over sequences in which episodes end and begin.

Its state is the concatenation of output and cell, S = 2 H. PyTorch processes full sequences several times as fast as
single steps, but cannot reset the state inside one. So sequences are split where an episode begins, and segments whose
lengths differ by less than a factor of two are padded to one length and run together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tether.control.policies.mlp import FloatArray, as_array


def uniform_lstm(inputs: int, width: int, generator: torch.Generator) -> nn.LSTM:
    """Return an LSTM whose weights and biases are initially uniform in ±width^-0.5, as in PyTorch.

    In a maze with a cue it learns faster than with orthogonal weights and zero biases.
    """
    lstm = nn.LSTM(inputs, width)
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5, generator=generator)
    return lstm


def in_numpy(lstm: nn.LSTM) -> Callable[[FloatArray, FloatArray], FloatArray]:
    """Return one step in NumPy with the current weights: (inputs [N, inputs], states [N, S]) -> next states.

    With sigmoid(z) = (1 + tanh(z / 2)) / 2, one tanh serves all four gates.
    """
    width = lstm.hidden_size
    input_weight, output_weight, *biases = (as_array(weight) for weight in _weights(lstm))
    scale = np.repeat(np.asarray([0.5, 0.5, 1.0, 0.5], dtype=np.float32), width)
    input_weight, output_weight, bias = input_weight.T * scale, output_weight.T * scale, (biases[0] + biases[1]) * scale

    def step(x: FloatArray, state: FloatArray) -> FloatArray:
        gates = np.tanh(x @ input_weight + state[:, :width] @ output_weight + bias)
        input_gate, forget_gate, output_gate = (0.5 + 0.5 * gates[:, i * width : (i + 1) * width] for i in (0, 1, 3))
        cell = forget_gate * state[:, width:] + input_gate * gates[:, 2 * width : 3 * width]
        return np.concatenate([output_gate * np.tanh(cell), cell], axis=1)

    return step


def _weights(lstm: nn.LSTM) -> list[Tensor]:
    return [lstm.get_parameter(name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]


def run_sequences(lstm: nn.LSTM, x: Tensor, starts: Tensor, state: Tensor) -> Tensor:
    """Return outputs [M, C, H] of inputs [M, C, inputs]; fast for long sequences.

    Args:
        lstm: an LSTM of width H.
        x: M sequences of C steps.
        starts: [M, C] steps before which the state is set to zero.
        state: [M, S] state before the first step, without gradient.
    """
    begins = starts.clone()
    begins[:, 0] = True
    first = begins.flatten().nonzero()[:, 0]
    length = first.diff(append=first.new_tensor([starts.numel()]))
    before = state[first // starts.shape[1]].masked_fill(starts.flatten()[first, None], 0.0)
    rows, size = x.flatten(0, 1), length.double().log2().ceil()
    outputs, positions = [], []
    for in_group in (size == group for group in size.unique()):
        steps = torch.arange(int(length[in_group].max()))[:, None]
        position, real = first[in_group] + steps, steps < length[in_group]
        hidden, cell = before[None, in_group].split(lstm.hidden_size, dim=2)
        output, _ = lstm(rows[position.clamp(max=len(rows) - 1)], (hidden.contiguous(), cell.contiguous()))
        outputs.append(output[real])
        positions.append(position[real])
    return torch.cat(outputs)[torch.cat(positions).argsort()].unflatten(0, starts.shape)


def run_steps(lstm: nn.LSTM, x: Tensor, starts: Tensor | None, state: Tensor) -> Tensor:
    """Return states [M, C, S] after each step, whose first half is the output; arguments as for `run_sequences`.

    `torch.nn.LSTM` returns the cell of the last step only.
    """
    weights = _weights(lstm)
    states = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None], 0.0)
        state = torch.cat(torch.lstm_cell(x[:, t], state.split(lstm.hidden_size, dim=1), *weights), dim=1)
        states.append(state)
    return torch.stack(states, dim=1)
