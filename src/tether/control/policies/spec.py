"""The spec of a control policy, the inputs of its networks, and the types that training exchanges with it.

The inputs are a flat row of numbers for perceptrons, and a stack of images for a CNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.policies.networks import (
    FORBIDDEN,
    CategoricalHead,
    GaussianHead,
    Head,
    MixedHead,
    RunningNormalizer,
    StateDependentHead,
)
from tether.observations import ObsLayout, ObsPart, row_width

NUMBERS, PICTURE, TEXT, ALLOWED = "numbers", "picture", "text", "allowed"
ObservationBatch: TypeAlias = Mapping[str, Tensor] | TensorDict
"""Field name -> [..., *shape], as environments return it."""


class FlatRow:
    """Concatenates fields as float32: discrete values one-hot, images [height, width, channels] flattened.

    Masks are not included.
    """

    def __init__(self, layout: ObsLayout, without: Sequence[str] = ()) -> None:
        self._first = layout[0]
        self._fields = tuple(field for field in layout if field.name not in without and field.kind != "mask")
        self.width = row_width(self._fields)
        single = self._fields[0] if len(self._fields) == 1 else None
        is_row = single is not None and (single.dtype, single.choices) == ("float32", ())
        self.single_field = single.name if single is not None and is_row else None
        """Name of the field that already is the row; None: the row must be computed."""

    def __call__(self, obs: ObservationBatch) -> Tensor:
        """Return the row [..., width] of fields [..., *shape]."""
        if self.single_field is not None:
            row: Tensor = obs[self.single_field]
            return row
        if self._fields:
            return torch.cat([_columns(field, obs[field.name]) for field in self._fields], dim=-1)
        rows = obs[self._first.name].shape[: -len(self._first.shape)]
        return torch.zeros(*rows, 0)


class Pictures:
    """Concatenates the channels of images of equal size."""

    def __init__(self, layout: ObsLayout, names: Sequence[str]) -> None:
        self._names = tuple(names)
        shapes = [field.shape for field in layout if field.name in names]
        height, width, _ = shapes[0]
        self.shape: tuple[int, int, int] = (sum(channels for *_, channels in shapes), height, width)
        """Channels, height, width."""

    def __call__(self, obs: ObservationBatch) -> Tensor:
        """Return bytes [..., channels, height, width], in channels-last memory order."""
        return torch.cat([obs[name] for name in self._names], dim=-1).movedim(-1, -3)


def _columns(field: ObsPart, values: Tensor) -> Tensor:
    """Return the columns [..., field.width] of a row."""
    if not field.choices:
        return values.flatten(-len(field.shape)).float()
    chosen = zip(values.unbind(-1), field.choices, strict=True)
    return torch.cat([nn.functional.one_hot(value, count) for value, count in chosen], dim=-1).float()


Observations = Tensor | TensorDict
"""Inputs of networks: numbers [..., O], or a TensorDict of numbers and an image stack, a text or a mask."""


@dataclass(frozen=True)
class PolicySpec:
    """Describes the networks and the head of a policy, sufficient to create it again."""

    obs_dim: int
    """O: width of the flat row of all fields except the images that a CNN reads."""
    choices: tuple[int, ...] | None
    """Number of alternatives of each discrete column of an action, which come first; None: all are continuous."""
    action_width: int
    """D: columns of an action."""
    num_action_chunks: int = 1
    """K: actions per decision; the head has K * D columns, where those of one action are adjacent."""
    value_width: int = 1
    """V: values per observation: 1, or K, one for the state before each action of the chunk; 0: no critic."""
    share_critic: bool = False
    """Whether the critic is a linear layer on the actor's features instead of a separate network."""
    hidden_dim: int = 256
    num_layers: int = 3
    critic_hidden_dim: int | None = None
    """Width of a separate critic; None: that of the actor."""
    critic_num_layers: int | None = None
    activation: str = "tanh"
    init_logstd: float = -0.5
    normalize_observations: bool = False
    normalize_only: tuple[str, ...] = ()
    """Names of the fields that are normalised; empty: all."""
    clip_observations: float = 10.0
    layout: ObsLayout = ()
    """The fields of an observation; empty: a single field ``state`` of O numbers."""
    pictures: tuple[str, ...] = ()
    """Names of the fields that a CNN reads; empty: no CNN."""
    cnn_type: str = "small"
    """Name in ``tether.control.policies.network_policy.CNNS``."""
    pixel_scale: float = 255.0
    """Pixels are divided by this."""
    dtype: str = "float32"
    """Dtype in which the CNN computes in training: float32 or bfloat16."""
    network: str | None = None
    """Reference to a user-defined network (`tether.control.policies.own_policy`); None: one of tether's networks."""
    features_extractor: str | None = None
    """Reference to a user-defined module in front of the hidden layers (`tether.control.policies.own_parts`)."""
    lstm_dim: int | None = None
    """Width of the LSTM after the hidden layers; None: no LSTM."""
    use_sde: bool = False
    """Whether the noise of continuous actions depends on the state, as in `StateDependentHead`."""
    sde_sample_freq: int | None = None
    """Number of consecutive decisions with the same noise matrix; None: all of a rollout."""

    @property
    def is_plain(self) -> bool:
        """Whether the policy consists of perceptrons only, whose gradients are computed in closed form."""
        special = self.pictures or self.lstm_dim is not None or self.network or self.features_extractor
        return not (special or self.has_mask or self.use_sde)

    @property
    def has_mask(self) -> bool:
        """Whether observations include a mask of allowed actions."""
        return any(field.kind == "mask" for field in self.layout)

    @property
    def critic_spec(self) -> PolicySpec:
        """The spec with the sizes of a separate critic."""
        return replace(
            self,
            hidden_dim=self.critic_hidden_dim or self.hidden_dim,
            num_layers=self.critic_num_layers or self.num_layers,
        )

    @property
    def parts(self) -> ObsLayout:
        """The fields of an observation."""
        return self.layout or (ObsPart("state", "vector", (self.obs_dim,)),)

    def is_number(self, field: ObsPart) -> bool:
        """Return whether a field is in the flat row."""
        return field.name not in self.pictures and field.kind != "mask"

    def make_row(self) -> FlatRow:
        """Return the function that flattens observations to rows."""
        return FlatRow(self.parts, without=self.pictures)

    def make_normalizer(self) -> RunningNormalizer | None:
        """Return the normalizer of the row, or None if it is not normalised."""
        if not self.normalize_observations:
            return None
        unchanged = [
            bool(self.normalize_only) and field.name not in self.normalize_only
            for field in self.parts
            if field.name not in self.pictures
            for _ in range(field.width)
        ]
        return RunningNormalizer(self.obs_dim, self.clip_observations, torch.tensor(unchanged, dtype=torch.bool))

    def make_pictures(self) -> Pictures | None:
        """Return the function that stacks the images, or None without a CNN."""
        return Pictures(self.parts, self.pictures) if self.pictures else None

    def make_head(self) -> Head:
        """Return the distribution of actions."""
        if self.choices is None:
            width = self.action_width * self.num_action_chunks
            if self.use_sde:
                features = self.lstm_dim or self.hidden_dim
                return StateDependentHead(width, features, self.init_logstd, self.sde_sample_freq)
            return GaussianHead(width, self.init_logstd)
        if numbers := self.action_width - len(self.choices):
            return MixedHead(self.choices, numbers, self.init_logstd)
        return CategoricalHead(self.choices * self.num_action_chunks)


@dataclass(frozen=True)
class Memory:
    """Inputs of a recurrent policy for M sequences of C decisions, in addition to the observations [M, C, ...]."""

    starts: Tensor
    """[M, C]: decisions that begin an episode, before which the state is zero."""
    state: Tensor
    """[M, S]: recurrent state before the first decision, as it was when acting."""
    selected: Tensor
    """[M, C]: decisions to learn from."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """Return a copy with a function applied to each tensor."""
        return Memory(change(self.starts), change(self.state), change(self.selected))

    def rows(self, which: slice | Tensor) -> Memory:
        return Memory(self.starts[which], self.state[which], self.selected[which])

    def split(self, size: int) -> list[Memory]:
        """Split into chunks of `size` sequences, the last one possibly smaller."""
        columns = (self.starts, self.state, self.selected)
        return [Memory(*chunk) for chunk in zip(*(column.split(size) for column in columns), strict=True)]


@dataclass(frozen=True)
class ForwardPass:
    """The outputs of a policy for B decisions, and the data that its ``backward`` needs."""

    outputs: Tensor
    """[B, outputs of the head]"""
    values: Tensor | None
    """[B, V]; None without a critic."""
    saved: Any


@dataclass(frozen=True)
class RolloutEvaluation:
    """The outputs of a policy for a full rollout of M rows of C decisions."""

    outputs: Tensor
    """[M, C, outputs of the head]"""
    values: Tensor | None
    """[M, C + 1, V]; None without a critic."""
    final_values: Tensor | None
    """[F, V]: values of the last observations of episodes."""


def numbers_of(obs: Observations) -> Tensor:
    """Return the numbers [..., O] of observations."""
    numbers: Tensor = obs if isinstance(obs, Tensor) else obs[NUMBERS]
    return numbers


def picture_of(obs: Observations) -> Tensor:
    """Return the image [..., C, H, W] of observations that have one."""
    assert not isinstance(obs, Tensor)
    picture: Tensor = obs[PICTURE]
    return picture


def masked(outputs: Tensor, obs: Observations) -> Tensor:
    """Return outputs [..., outputs] in which logits of forbidden alternatives are so low that they are never sampled.

    The distribution is the softmax over the allowed alternatives (Huang and Ontanon 2020); forbidden ones have
    probability 0 and no gradient. If a column has no allowed alternative, as may happen after the end of an episode,
    all are equally likely.
    """
    if isinstance(obs, Tensor) or ALLOWED not in obs:
        return outputs
    forbidden = ~obs[ALLOWED]
    if further := outputs.shape[-1] - forbidden.shape[-1]:  # outputs of continuous columns, which have no mask
        forbidden = nn.functional.pad(forbidden, (0, further))
    return outputs.masked_fill(forbidden, FORBIDDEN)


def with_numbers(obs: Observations, numbers: Tensor) -> Observations:
    """Return the observations with their numbers replaced."""
    return numbers if isinstance(obs, Tensor) else obs.clone(recurse=False).set(NUMBERS, numbers)
