"""Control policies whose gradients autograd takes: with a CNN, masks, an LSTM, or noise that depends on the state.

Where `ControlPolicy` has two perceptrons, these have a torso each for actor and critic, or one for both, with a linear
layer on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.models.control.actors import Actor, Forward, NetworkActor
from tether.models.control.cnn import Cnn
from tether.models.control.lstm import in_numpy, run_sequences, run_steps, uniform_lstm
from tether.models.control.micro_batches import backward_in_micro_batches, forward_in_micro_batches
from tether.models.control.mlp import ACTIVATIONS, FloatArray, as_array, layers_in_numpy, orthogonal_linear
from tether.models.control.observations import ALLOWED, NUMBERS, PICTURE, ObservationBatch
from tether.models.control.own_parts import OwnFeatures
from tether.models.control.spec import (
    ForwardPass,
    Memory,
    Observations,
    PolicySpec,
    RolloutEvaluation,
    masked,
    numbers_of,
    picture_of,
)
from tether.observations import ACTION_MASK

WITHOUT_GRADIENTS = 16
"""Where none is taken, so many times the decisions of a micro-batch pass at once: nothing of them is kept."""


class Torso(nn.Module):
    """From observations to features: what the spec asks for of a CNN, or the user's own, hidden layers and an LSTM."""

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
        """Features [..., width].

        Args:
            obs: normalised, [B, ...]; with an LSTM [M, C, ...].
            starts: with an LSTM, [M, C]: decisions that begin an episode.
            state: [M, S], S = 0 without an LSTM.
        """
        x = self._before_lstm(obs)
        if self.lstm is None:
            return x
        assert starts is not None
        return run_sequences(self.lstm, x, starts, state)

    def step(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """Features [..., width], and the states [M, C, S] after each decision (`state` without an LSTM).

        For the arguments see `forward`; without `starts` none begins an episode.
        """
        x = self._before_lstm(obs)
        if self.lstm is None:
            return x, state
        states = run_steps(self.lstm, x, starts, state)
        return states[..., : self.width], states

    def in_numpy(self) -> Forward:
        """`step` of single decisions [N, ...] in NumPy, with the weights of this moment; there is no CNN."""
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
    """Actor and critic over pictures, or with a memory.

    Args:
        spec: the shape.
        seed: of the first weights.
    """

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
            self.critic_torso = None if spec.share_critic else Torso(spec.of_critic, generator)
            self.critic = orthogonal_linear((self.critic_torso or self.torso).width, spec.value_width, 1.0, generator)
        self.normalizer = spec.make_normalizer()
        self.micro_batch: int | None = None
        """Decisions of a forward and backward pass, or one sequence where that is more; None: all at once."""

    @property
    def state_width(self) -> int:
        """S: of the memory: that of the actor, and of a critic with a torso of its own."""
        return 2 * (self.spec.lstm_dim or 0) * (1 if self.critic_torso is None else 2)

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of the actor, what it shares among them, and of the critic."""
        actor = [*self.torso.parameters(), *self.actor.parameters(), *self.head.parameters()]
        critic = [module for module in (self.critic_torso, self.critic) if module is not None]
        return actor, [parameter for module in critic for parameter in module.parameters()]

    def networks(self) -> list[nn.Module]:
        """The trained parameters besides those of the head."""
        return [part for part in (self.torso, self.actor, self.critic_torso, self.critic) if part is not None]

    def inputs(self, obs: ObservationBatch) -> Observations:
        """The inputs of the networks from observations [..., *shape]: numbers [..., O], normalised; picture; mask."""
        row = self.row(obs)
        row = row if self.normalizer is None else self.normalizer(row)
        more = {} if self.pictures is None else {PICTURE: self.pictures(obs)}
        if self.spec.has_mask:
            more[ALLOWED] = obs[ACTION_MASK].bool()
        return TensorDict({NUMBERS: row, **more}, batch_size=row.shape[:-1]) if more else row

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Take the numbers of observations [B, ...] into the statistics by which they are normalised."""
        if self.normalizer is not None:
            self.normalizer.update(self.row(obs))

    def forward(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs [..., outputs] and values [..., V]; for the rest see `Torso.forward`."""
        of_actor, of_critic = self._states(state)
        features = self.torso(obs, starts, of_actor)
        outputs = self._outputs(features, obs)
        if self.critic is None:
            return outputs, None
        valued = features if self.critic_torso is None else self.critic_torso(obs, starts, of_critic)
        return outputs, self.critic(valued)

    def step(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Outputs, values and states after each decision; see `Torso.step`."""
        of_actor, of_critic = self._states(state)
        features, states = self.torso.step(obs, starts, of_actor)
        outputs = self._outputs(features, obs)
        if self.critic is None:
            return outputs, None, states
        valued = features
        if self.critic_torso is not None:
            valued, critic_states = self.critic_torso.step(obs, starts, of_critic)
            states = torch.cat([states, critic_states], dim=-1)
        return outputs, self.critic(valued), states

    def acting(self) -> Actor | NetworkActor:
        """An actor with the current weights."""
        reads_numbers = self.pictures is None and self.spec.network is None and self.spec.features_extractor is None
        return Actor(self) if reads_numbers else NetworkActor(self)

    def in_numpy(self) -> Forward:
        """The actor's outputs and the next states in NumPy, with the weights of this moment; not for pictures."""
        torso = self.torso.in_numpy()
        other = self.critic_torso.in_numpy() if self.critic_torso is not None and self.spec.lstm_dim else None
        weight, bias = as_array(self.actor.weight).T, as_array(self.actor.bias)
        of_actor = 2 * (self.spec.lstm_dim or 0)

        def forward(row: FloatArray, state: FloatArray) -> tuple[FloatArray, FloatArray]:
            features, after = torso(row, state[:, :of_actor])
            if other is not None:
                after = np.concatenate([after, other(row, state[:, of_actor:])[1]], axis=1)
            outputs = features @ weight + bias
            return np.concatenate([outputs, features], axis=1) if self.spec.use_sde else outputs, after

        return forward

    @torch.no_grad()
    def act(self, obs: Observations, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [N, outputs] for what `inputs` gave of N observations, and the next state, from the state [N, S]."""
        if self.spec.lstm_dim is None:
            return self._outputs(self.torso(obs, None, state), obs), state
        outputs, _, states = self.step(obs.unsqueeze(1), None, state)
        return outputs[:, 0], states[:, 0]

    def log_probs(self, obs: Observations, actions: Tensor) -> Tensor:
        """Log-probabilities [B, K * D] of actions [B, K * D], differentiable, without a memory."""
        outputs, _ = self(obs, None, torch.zeros(len(actions), 0))
        return self.head.evaluate(outputs, actions).log_probs

    @torch.no_grad()
    def outputs(self, obs: Observations, memory: Memory | None, actions: Tensor | None = None) -> Tensor:
        """Outputs [B, outputs], as `run`."""
        return torch.cat([self.decide(*piece)[0] for piece in self._pieces(obs, memory)])

    def run(self, obs: Observations, memory: Memory | None, actions: Tensor | None = None) -> ForwardPass:
        """Say something of B decisions, for `backward`.

        Args:
            obs: normalised, [B, ...]; with an LSTM [M, C, ...].
            memory: with an LSTM: the rest; the B decisions that it keeps are the result.
            actions: those that were taken, for policies whose outputs depend on them.
        """
        return forward_in_micro_batches(self.decide, self._pieces(obs, memory))

    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every parameter but the head's into its existing ``grad``.

        Args:
            passed: what `run` gave.
            outputs_grad: of the loss by the outputs, [B, outputs]; None: there is none.
            values_grad: by the values, [B, V].
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
        """Pass over a rollout.

        Args:
            obs: normalised, [M, C + 1, ...].
            starts: [M, C + 1]: decisions that begin an episode.
            state: [M, S]: before the first decision.
            final_obs: normalised, [F, ...]: last observations of episodes.
            final_at: [F], [F]: column and decision after which they were seen.
            actions: [M, C, K * D]: see `run`.
        """
        if self.spec.lstm_dim is None:
            outputs, values = self._in_parts(obs.flatten(0, 1))
            outputs = outputs.unflatten(0, starts.shape)[:, :-1]
            if values is None:
                return RolloutEvaluation(outputs, None, None)
            return RolloutEvaluation(outputs, values.unflatten(0, starts.shape), self._in_parts(final_obs)[1])
        columns, decisions = starts.shape
        size = columns if self.micro_batch is None else max(1, WITHOUT_GRADIENTS * self.micro_batch // decisions)
        pieces = [slice(first, first + size) for first in range(0, columns, size)]
        parts = [self.step(obs[piece], starts[piece], state[piece]) for piece in pieces]
        outputs = torch.cat([part[0] for part in parts])[:, :-1]
        if self.critic is None:
            return RolloutEvaluation(outputs, None, None)
        values = torch.cat([part[1] for part in parts if part[1] is not None])
        after = torch.cat([part[2] for part in parts])[final_at]
        _, final_values, _ = self.step(final_obs.unsqueeze(1), None, after)
        return RolloutEvaluation(outputs, values, None if final_values is None else final_values[:, 0])

    def _outputs(self, features: Tensor, obs: Observations) -> Tensor:
        """Outputs of the head [..., outputs] on features [..., width]; for noise that depends on them, with them."""
        outputs = masked(self.actor(features), obs)
        return torch.cat([outputs, features.detach()], dim=-1) if self.spec.use_sde else outputs

    def _states(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """States of the actor and of a critic with a torso of its own."""
        actors = 2 * (self.spec.lstm_dim or 0)
        return state[..., :actors], state[..., actors:]

    def _pieces(self, obs: Observations, memory: Memory | None) -> Iterator[tuple[Observations, Memory | None]]:
        """Micro-batches of `run`."""
        rows, of_each = len(obs), 1 if memory is None else memory.kept.shape[1]
        size = max(1, rows if self.micro_batch is None else self.micro_batch // of_each)
        for first in range(0, max(1, rows), size):
            yield obs[first : first + size], None if memory is None else memory.rows(slice(first, first + size))

    def _in_parts(self, obs: Observations) -> tuple[Tensor, Tensor | None]:
        """Outputs and values of observations [B, ...], without a memory."""
        results = [self.decide(*piece) for piece in self._pieces(obs, None)]
        values = [part for _, part in results if part is not None]
        return torch.cat([part for part, _ in results]), torch.cat(values) if values else None

    def decide(
        self, obs: Observations, memory: Memory | None, actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, outputs] and values [B, V] of the B decisions of `run`, differentiable."""
        if memory is None:
            return self(obs, None, torch.zeros(len(obs), 0))
        outputs, values = self(obs, memory.starts, memory.state)
        return outputs[memory.kept], None if values is None else values[memory.kept]
