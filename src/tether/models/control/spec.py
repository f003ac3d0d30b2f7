"""The shape of a control policy, and what passes between it and what trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.models.control.heads import CategoricalHead, GaussianHead, Head, StateDependentHead
from tether.models.control.normalize import RunningNormalizer
from tether.models.control.observations import ALLOWED, NUMBERS, PICTURE, FlatRow, Pictures
from tether.observations import ObsLayout, ObsPart

Observations = Tensor | TensorDict
"""Inputs of networks: numbers [..., O], or a TensorDict of numbers and a picture, a text or a mask."""
FORBIDDEN = -1e9
"""Logit of a choice that is not allowed; finite, so that nothing computed from it is NaN."""


@dataclass(frozen=True)
class PolicySpec:
    """The shape of a policy: enough to build it again."""

    obs_dim: int
    """O: numbers that are read as a flat row: all, or those that are in no picture a CNN reads."""
    choices: tuple[int, ...] | None
    """Alternatives of each column of an action; None: actions are numbers."""
    action_width: int
    """D: columns of an action."""
    num_action_chunks: int = 1
    """K: actions that are decided on at once; the head has K * D columns, those of an action side by side."""
    value_width: int = 1
    """V: values of an observation: 1, or K, one before each action of the chunk; 0: there is no critic."""
    share_critic: bool = False
    """The critic is a linear layer on what the actor's is on, not a network of its own."""
    hidden_dim: int = 256
    num_layers: int = 3
    critic_hidden_dim: int | None = None
    """Of a critic's own network; None: as the actor's."""
    critic_num_layers: int | None = None
    activation: str = "tanh"
    init_logstd: float = -0.5
    normalize_observations: bool = False
    normalize_only: tuple[str, ...] = ()
    """Names of the parts that are normalised; empty: all."""
    clip_observations: float = 10.0
    layout: ObsLayout = ()
    """The parts of an observation; empty: one of O numbers, ``state``."""
    pictures: tuple[str, ...] = ()
    """Names of the parts that a CNN reads; none: there is no CNN."""
    cnn_type: str = "small"
    """In ``tether.models.control.cnn.CNNS``."""
    pixel_scale: float = 255.0
    """Pixels are divided by this."""
    network: str | None = None
    """Names a network of the user's (`tether.models.control.own_policy`); None: it is one of tether's."""
    features_extractor: str | None = None
    """Names what of the user's reads observations before the hidden layers (`tether.models.control.own_parts`)."""
    lstm_dim: int | None = None
    """Width of the LSTM after the hidden layers; None: there is none."""
    use_sde: bool = False
    """The noise of numbers depends on the state; see `StateDependentHead`."""
    sde_sample_freq: int | None = None
    """Decisions for which it is kept; None: all of a rollout."""

    @property
    def is_plain(self) -> bool:
        """Nothing but perceptrons, whose gradients are taken by hand."""
        special = self.pictures or self.lstm_dim is not None or self.network or self.features_extractor
        return not (special or self.has_mask or self.use_sde)

    @property
    def has_mask(self) -> bool:
        """Observations say which choices are allowed."""
        return any(part.kind == "mask" for part in self.layout)

    @property
    def of_critic(self) -> PolicySpec:
        """The same with the sizes of the critic's own network."""
        return replace(
            self,
            hidden_dim=self.critic_hidden_dim or self.hidden_dim,
            num_layers=self.critic_num_layers or self.num_layers,
        )

    @property
    def parts(self) -> ObsLayout:
        """The parts of an observation."""
        return self.layout or (ObsPart("state", "vector", (self.obs_dim,)),)

    def is_number(self, part: ObsPart) -> bool:
        """The part stands in the row of numbers."""
        return part.name not in self.pictures and part.kind != "mask"

    def make_row(self) -> FlatRow:
        """The module that flattens the numbers of observations."""
        return FlatRow(self.parts, without=self.pictures)

    def make_normalizer(self) -> RunningNormalizer | None:
        """The running statistics of the row, where it is normalised."""
        if not self.normalize_observations:
            return None
        kept = [
            bool(self.normalize_only) and part.name not in self.normalize_only
            for part in self.parts
            if part.name not in self.pictures
            for _ in range(part.width)
        ]
        return RunningNormalizer(self.obs_dim, self.clip_observations, torch.tensor(kept, dtype=torch.bool))

    def make_pictures(self) -> Pictures | None:
        """The module that stacks the pictures, where a CNN reads them."""
        return Pictures(self.parts, self.pictures) if self.pictures else None

    def make_head(self) -> Head:
        """The distribution of actions."""
        if self.choices is None:
            width = self.action_width * self.num_action_chunks
            if self.use_sde:
                features = self.lstm_dim or self.hidden_dim
                return StateDependentHead(width, features, self.init_logstd, self.sde_sample_freq)
            return GaussianHead(width, self.init_logstd)
        return CategoricalHead(self.choices * self.num_action_chunks)


@dataclass(frozen=True)
class Memory:
    """Inputs of a policy with an LSTM besides the observations [M, C, ...] of M sequences of C decisions."""

    starts: Tensor
    """[M, C]: decisions that begin an episode, before which the state is zero."""
    state: Tensor
    """[M, S]: before the first decision, as the policy had it when it acted."""
    kept: Tensor
    """[M, C]: decisions that are learned from."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The same change of each column."""
        return Memory(change(self.starts), change(self.state), change(self.kept))

    def rows(self, which: slice | Tensor) -> Memory:
        """Some of the sequences."""
        return Memory(self.starts[which], self.state[which], self.kept[which])


@dataclass(frozen=True)
class ForwardPass:
    """The outputs of a policy for B decisions, and what its ``backward`` needs."""

    outputs: Tensor
    """[B, outputs of the head]"""
    values: Tensor | None
    """[B, V]; None: there is no critic."""
    saved: Any


@dataclass(frozen=True)
class RolloutEvaluation:
    """The outputs of a policy for a whole rollout of C decisions in M columns."""

    outputs: Tensor
    """[M, C, outputs of the head]"""
    values: Tensor | None
    """[M, C + 1, V]; None: there is no critic."""
    final_values: Tensor | None
    """[F, V]: of the last observations of episodes."""


def numbers_of(obs: Observations) -> Tensor:
    """The numbers [..., O] of observations."""
    numbers: Tensor = obs if isinstance(obs, Tensor) else obs[NUMBERS]
    return numbers


def picture_of(obs: Observations) -> Tensor:
    """The picture [..., C, H, W] of observations that have one."""
    assert not isinstance(obs, Tensor)
    picture: Tensor = obs[PICTURE]
    return picture


def masked(outputs: Tensor, obs: Observations) -> Tensor:
    """Logits [..., outputs], those of choices that are not allowed so low that they are never sampled.

    The distribution is the softmax over the allowed alternatives (Huang and Ontanon 2020); the others have probability
    0 and no gradient. Where none of a column is allowed, as it may be after an episode's end, all are alike.
    """
    if isinstance(obs, Tensor) or ALLOWED not in obs:
        return outputs
    return outputs.masked_fill(~obs[ALLOWED], FORBIDDEN)


def with_numbers(obs: Observations, numbers: Tensor) -> Observations:
    """The same observations with other numbers."""
    return numbers if isinstance(obs, Tensor) else obs.clone(recurse=False).set(NUMBERS, numbers)


def device_of(policy: nn.Module) -> torch.device:
    """Where a policy computes."""
    return next(policy.parameters()).device
