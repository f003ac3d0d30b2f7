"""Control policies with gradients by autograd: with a CNN, action masks, an LSTM, or state-dependent noise.

Instead of the two perceptrons of `ControlPolicy`, actor and critic have one torso each, or a shared one, with a linear
layer on top.

The state of an LSTM is the concatenation of output and cell, S = 2 H. PyTorch processes full sequences several times as
fast as single steps, but cannot reset the state inside a sequence. So sequences are split where episodes begin, and
segments whose lengths differ by less than a factor of two are padded to one length and run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.policies.micro_batches import backward_in_micro_batches, forward_in_micro_batches
from tether.control.policies.networks import (
    ACTIVATIONS,
    Actor,
    FloatArray,
    Forward,
    NetworkActor,
    as_array,
    device_of,
    layers_in_numpy,
    orthogonal_linear,
)
from tether.control.policies.own_parts import OwnFeatures
from tether.control.policies.spec import (
    ALLOWED,
    NUMBERS,
    PICTURE,
    ForwardPass,
    Memory,
    ObservationBatch,
    Observations,
    PolicySpec,
    RolloutEvaluation,
    masked,
    numbers_of,
    picture_of,
)
from tether.observations import ACTION_MASK
from tether.types import JsonObject


@dataclass(frozen=True)
class Convolution:
    """One convolutional layer."""

    channels: int
    kernel: int
    stride: int
    padding: int = 0


CNNS: Mapping[str, tuple[Convolution, ...]] = {
    "nature": (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1)),
    "small": (Convolution(16, 3, 1, 1), Convolution(32, 3, 2, 1)),
}
"""CNNs by name: "nature" (DQN, Mnih et al. 2015); "small" for images with few cells, each of which matters."""
SMALLEST = {"nature": 36, "small": 1}
"""Minimum height and width of images for each CNN."""


class Cnn(nn.Module):
    """Computes features of an image.

    Args:
        picture: channels, height and width of the image; the latter two at least `SMALLEST`.
        kind: a name in `CNNS`.
        activation: a name in ``ACTIVATIONS``, applied after each layer.
        pixel_scale: pixels are divided by this.
        generator: random generator of the orthogonal initialisation.
    """

    def __init__(
        self, picture: tuple[int, int, int], kind: str, activation: str, pixel_scale: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self._activation, self._scale = ACTIVATIONS[activation], pixel_scale
        channels, height, width = picture
        layers = []
        for spec in CNNS[kind]:
            layer = nn.Conv2d(channels, spec.channels, spec.kernel, spec.stride, spec.padding)
            nn.init.orthogonal_(layer.weight, self._activation.gain, generator=generator)
            nn.init.zeros_(layer.get_parameter("bias"))
            layers.append(layer)
            channels = spec.channels
            height, width = ((n + 2 * spec.padding - spec.kernel) // spec.stride + 1 for n in (height, width))
        assert height > 0, (picture, kind)
        assert width > 0, (picture, kind)
        self.layers = nn.ModuleList(layers)
        self.features = channels * height * width

    def forward(self, picture: Tensor) -> Tensor:
        """Return features [..., features] of bytes [..., C, H, W]."""
        x = picture.flatten(0, -4).to(self.layers[0].get_parameter("weight").dtype) / self._scale
        x = x.contiguous(memory_format=torch.channels_last)  # faster for few channels, forward and backward
        for layer in self.layers:
            x = self._activation.apply(layer(x))
        return x.reshape(*picture.shape[:-3], self.features).to(torch.promote_types(x.dtype, torch.float32))


def uniform_lstm(inputs: int, width: int, generator: torch.Generator) -> nn.LSTM:
    """Return an LSTM whose initial weights and biases are uniform in ±width^-0.5, as in PyTorch.

    In a maze with a cue, this learns faster than orthogonal weights and zero biases.
    """
    lstm = nn.LSTM(inputs, width)
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5, generator=generator)
    return lstm


def in_numpy(lstm: nn.LSTM) -> Callable[[FloatArray, FloatArray], FloatArray]:
    """Return a function that computes one step in NumPy with the current weights: (inputs [N, inputs], states [N, S])
    -> next states.

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


WITHOUT_GRADIENTS = 16
"""Factor on the micro-batch size for passes without gradients, which store no activations."""


class Torso(nn.Module):
    """Computes features of observations with a CNN or a user-defined extractor, hidden layers and an LSTM, as the spec
    configures them."""

    def __init__(self, spec: PolicySpec, generator: torch.Generator) -> None:
        super().__init__()
        pictures, reads = spec.make_pictures(), spec.obs_dim
        self.cnn: Cnn | None = None
        self.own: OwnFeatures | None = None
        if spec.features_extractor is not None:
            self.own = OwnFeatures(spec, generator)
            reads = self.own.features
        elif pictures is not None:
            self.cnn = Cnn(pictures.shape, spec.cnn_type, spec.activation, spec.pixel_scale, generator)
            reads += self.cnn.features
        self._activation = ACTIVATIONS[spec.activation]
        sizes = [reads] + [spec.hidden_dim] * spec.num_layers
        gain = self._activation.gain
        self.hidden = nn.ModuleList([orthogonal_linear(*pair, gain, generator) for pair in pairwise(sizes)])
        self.lstm = None if spec.lstm_dim is None else uniform_lstm(spec.hidden_dim, spec.lstm_dim, generator)
        self.width = spec.lstm_dim or spec.hidden_dim

    def forward(self, obs: Observations, starts: Tensor | None, state: Tensor) -> Tensor:
        """Return features [..., width].

        Args:
            obs: normalised observations [B, ...]; with an LSTM [M, C, ...].
            starts: with an LSTM, [M, C] decisions that begin an episode.
            state: [M, S] recurrent state, S = 0 without an LSTM.
        """
        x = self._before_lstm(obs)
        if self.lstm is None:
            return x
        assert starts is not None
        return run_sequences(self.lstm, x, starts, state)

    def step(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [..., width], and the states [M, C, S] after each decision (`state` without an LSTM).

        Arguments are those of `forward`; without `starts`, no decision begins an episode.
        """
        x = self._before_lstm(obs)
        if self.lstm is None:
            return x, state
        states = run_steps(self.lstm, x, starts, state)
        return states[..., : self.width], states

    def in_numpy(self) -> Forward:
        """Return a function that computes `step` for single decisions [N, ...] in NumPy with the current weights; not
        available with a CNN."""
        layers = [(layer.get_parameter("weight"), layer.get_parameter("bias")) for layer in self.hidden]
        hidden = layers_in_numpy(layers, self._activation)
        if self.lstm is None:
            return lambda x, state: (hidden(x), state)
        step, width = in_numpy(self.lstm), self.width

        def forward(x: FloatArray, state: FloatArray) -> tuple[FloatArray, FloatArray]:
            after = step(hidden(x), state)
            return after[:, :width], after

        return forward

    def _before_lstm(self, obs: Observations) -> Tensor:
        x = numbers_of(obs) if self.own is None else self.own(obs)
        if self.cnn is not None:
            x = torch.cat([self.cnn(picture_of(obs)), x], dim=-1)
        for layer in self.hidden:
            x = self._activation.apply(layer(x))
        return x


class NetworkPolicy(nn.Module):
    """Actor and critic with torsos, which may have a CNN and recurrent state."""

    spaces: JsonObject | None = None
    """Spaces of the environment (`tether.control.envs.spaces`); None: not known."""

    def __init__(self, spec: PolicySpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self.row, self.pictures = spec.make_row(), spec.make_pictures()
        self.head = spec.make_head()
        self.torso = Torso(spec, generator)
        self.actor = orthogonal_linear(self.torso.width, self.head.linear, 0.01 * math.sqrt(2), generator)
        self.critic_torso: Torso | None = None
        self.critic: nn.Linear | None = None
        if spec.value_width:
            self.critic_torso = None if spec.share_critic else Torso(spec.critic_spec, generator)
            self.critic = orthogonal_linear((self.critic_torso or self.torso).width, spec.value_width, 1.0, generator)
        self.normalizer = spec.make_normalizer()
        self.micro_batch: int | None = None
        """Number of decisions in a forward and backward pass, at least one sequence; None: all at once."""

    @property
    def state_width(self) -> int:
        """S: width of the recurrent state of the actor, and of a critic with its own torso."""
        return 2 * (self.spec.lstm_dim or 0) * (1 if self.critic_torso is None else 2)

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of the actor, including shared ones, and of the critic."""
        actor = [*self.torso.parameters(), *self.actor.parameters(), *self.head.parameters()]
        critic = [module for module in (self.critic_torso, self.critic) if module is not None]
        return actor, [parameter for module in critic for parameter in module.parameters()]

    def narrow_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that compute in bfloat16 in training: those of CNNs, if the spec says so."""
        cnns = [module for module in self.modules() if isinstance(module, Cnn)]
        return [parameter for cnn in cnns for parameter in cnn.parameters()] if self.spec.dtype == "bfloat16" else []

    def networks(self) -> list[nn.Module]:
        """Return the trained modules except the head."""
        return [module for module in (self.torso, self.actor, self.critic_torso, self.critic) if module is not None]

    def inputs(self, obs: ObservationBatch) -> Observations:
        """Return the inputs of the networks for observations [..., *shape]: normalised numbers [..., O], image,
        mask."""
        row = self.row(obs)
        row = row if self.normalizer is None else self.normalizer(row)
        others = {} if self.pictures is None else {PICTURE: self.pictures(obs)}
        if self.spec.has_mask:
            others[ALLOWED] = obs[ACTION_MASK].bool()
        return TensorDict({NUMBERS: row, **others}, batch_size=row.shape[:-1]) if others else row

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Update the statistics for normalisation with the numbers of observations [B, ...]."""
        if self.normalizer is not None:
            self.normalizer.update(self.row(obs))

    def forward(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs [..., outputs] and values [..., V]; arguments as for `Torso.forward`."""
        actor_state, critic_state = self._states(state)
        features = self.torso(obs, starts, actor_state)
        outputs = self._outputs(features, obs)
        if self.critic is None:
            return outputs, None
        valued = features if self.critic_torso is None else self.critic_torso(obs, starts, critic_state)
        return outputs, self.critic(valued)

    def step(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return outputs, values and states after each decision; arguments as for `Torso.step`."""
        actor_state, critic_state = self._states(state)
        features, states = self.torso.step(obs, starts, actor_state)
        outputs = self._outputs(features, obs)
        if self.critic is None:
            return outputs, None, states
        valued = features
        if self.critic_torso is not None:
            valued, critic_states = self.critic_torso.step(obs, starts, critic_state)
            states = torch.cat([states, critic_states], dim=-1)
        return outputs, self.critic(valued), states

    def acting(self) -> Actor | NetworkActor:
        own = self.spec.network or self.spec.features_extractor
        in_numpy = self.pictures is None and not own and device_of(self).type == "cpu"
        return Actor(self) if in_numpy else NetworkActor(self)

    def in_numpy(self) -> Forward:
        """Return a function that computes the actor's outputs and next states in NumPy with the current weights; not
        available for images."""
        torso = self.torso.in_numpy()
        other = self.critic_torso.in_numpy() if self.critic_torso is not None and self.spec.lstm_dim else None
        weight, bias = as_array(self.actor.weight).T, as_array(self.actor.bias)
        actor_width = 2 * (self.spec.lstm_dim or 0)

        def forward(row: FloatArray, state: FloatArray) -> tuple[FloatArray, FloatArray]:
            features, after = torso(row, state[:, :actor_width])
            if other is not None:
                after = np.concatenate([after, other(row, state[:, actor_width:])[1]], axis=1)
            outputs = features @ weight + bias
            return np.concatenate([outputs, features], axis=1) if self.spec.use_sde else outputs, after

        return forward

    @torch.no_grad()
    def act(self, obs: Observations, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [N, outputs] and the next states for the `inputs` of N observations and states [N, S]."""
        if self.spec.lstm_dim is None:
            return self._outputs(self.torso(obs, None, state), obs), state
        outputs, _, states = self.step(obs.unsqueeze(1), None, state)
        return outputs[:, 0], states[:, 0]

    def log_probs(self, obs: Observations, actions: Tensor) -> Tensor:
        """Return differentiable log-probabilities [B, K * D] of actions [B, K * D], for policies without recurrent
        state."""
        outputs, _ = self(obs, None, torch.zeros(len(actions), 0))
        return self.head.evaluate(outputs, actions).log_probs

    @torch.no_grad()
    def outputs(self, obs: Observations, memory: Memory | None, actions: Tensor | None = None) -> Tensor:
        """Return outputs [B, outputs], as `run` does."""
        return torch.cat([self.decide(*batch)[0] for batch in self._micro_batches(obs, memory)])

    def run(self, obs: Observations, memory: Memory | None, actions: Tensor | None = None) -> ForwardPass:
        """Run a forward pass over B decisions, for `backward`.

        Args:
            obs: normalised observations [B, ...]; with an LSTM [M, C, ...].
            memory: with an LSTM, its other inputs; the result is for the B decisions that it selects.
            actions: the recorded actions, for policies whose outputs depend on them.
        """
        return forward_in_micro_batches(self.decide, self._micro_batches(obs, memory))

    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every parameter except the head's into its existing ``grad``.

        Args:
            passed: result of `run`.
            outputs_grad: gradient of the loss with respect to the outputs, [B, outputs]; None: no gradient.
            values_grad: gradient with respect to the values, [B, V].
        """
        for network in self.networks():
            network.zero_grad(set_to_none=False)
        backward_in_micro_batches(self.decide, passed, outputs_grad, values_grad)

    @torch.no_grad()
    def review(
        self,
        obs: Observations,
        starts: Tensor,
        state: Tensor,
        final_obs: Observations,
        final_at: tuple[Tensor, Tensor],
        actions: Tensor | None = None,
    ) -> RolloutEvaluation:
        """Evaluate a rollout.

        Args:
            obs: normalised observations [M, C + 1, ...].
            starts: [M, C + 1] decisions that begin an episode.
            state: [M, S] recurrent state before the first decision.
            final_obs: normalised last observations of episodes, [F, ...].
            final_at: [F], [F] row and decision after which each of them occurred.
            actions: [M, C, K * D], as for `run`.
        """
        if self.spec.lstm_dim is None:
            outputs, values = self._evaluate(obs.flatten(0, 1))
            outputs = outputs.unflatten(0, starts.shape)[:, :-1]
            if values is None:
                return RolloutEvaluation(outputs, None, None)
            return RolloutEvaluation(outputs, values.unflatten(0, starts.shape), self._evaluate(final_obs)[1])
        columns, decisions = starts.shape
        size = columns if self.micro_batch is None else max(1, WITHOUT_GRADIENTS * self.micro_batch // decisions)
        slices = [slice(first, first + size) for first in range(0, columns, size)]
        results = [self.step(obs[rows], starts[rows], state[rows]) for rows in slices]
        outputs = torch.cat([result[0] for result in results])[:, :-1]
        if self.critic is None:
            return RolloutEvaluation(outputs, None, None)
        values = torch.cat([result[1] for result in results if result[1] is not None])
        after = torch.cat([result[2] for result in results])[final_at]
        _, final_values, _ = self.step(final_obs.unsqueeze(1), None, after)
        return RolloutEvaluation(outputs, values, None if final_values is None else final_values[:, 0])

    def _outputs(self, features: Tensor, obs: Observations) -> Tensor:
        """Return the head's outputs [..., outputs] for features [..., width]; state-dependent noise also needs the
        features, which then follow the means."""
        outputs = masked(self.actor(features), obs)
        return torch.cat([outputs, features.detach()], dim=-1) if self.spec.use_sde else outputs

    def _states(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Split states into those of the actor and those of a critic with its own torso."""
        actors = 2 * (self.spec.lstm_dim or 0)
        return state[..., :actors], state[..., actors:]

    def _micro_batches(self, obs: Observations, memory: Memory | None) -> Iterator[tuple[Observations, Memory | None]]:
        """Yield the micro-batches of `run`."""
        rows, per_row = len(obs), 1 if memory is None else memory.selected.shape[1]
        size = max(1, rows if self.micro_batch is None else self.micro_batch // per_row)
        for first in range(0, max(1, rows), size):
            yield obs[first : first + size], None if memory is None else memory.rows(slice(first, first + size))

    def _evaluate(self, obs: Observations) -> tuple[Tensor, Tensor | None]:
        """Return outputs and values of observations [B, ...], without recurrent state."""
        results = [self.decide(*batch) for batch in self._micro_batches(obs, None)]
        values = [value for _, value in results if value is not None]
        return torch.cat([output for output, _ in results]), torch.cat(values) if values else None

    def decide(
        self, obs: Observations, memory: Memory | None, actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return differentiable outputs [B, outputs] and values [B, V] of the B decisions of `run`."""
        if memory is None:
            return self(obs, None, torch.zeros(len(obs), 0))
        outputs, values = self(obs, memory.starts, memory.state)
        return outputs[memory.selected], None if values is None else values[memory.selected]
