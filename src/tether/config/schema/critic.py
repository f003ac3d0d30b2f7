"""`critic`: the value model and its update."""

from __future__ import annotations

from typing import Annotated

from tether.config.schema.actor import LossAggMode
from tether.config.schema.engine import IN_SHARDS, MEGATRON, ON_RANKS, CriticMegatronConfig, Strategy
from tether.config.schema.model import CriticModelConfig
from tether.config.schema.optim import CriticOptimConfig
from tether.config.schema.section import (
    EMBODIED,
    EMBODIED_TOO,
    ActsIf,
    AliasOf,
    Inherits,
    Positive,
    PositiveFloat,
    Section,
)


class CriticConfig(Section):
    """The value model and its update."""

    enable: Annotated[bool, Inherits("algorithm.adv_estimator", equals="gae")]
    """Train a critic; unset: only where adv_estimator is gae."""
    ppo_mini_batch_size: Annotated[Positive, Inherits("actor_rollout_ref.actor.ppo_mini_batch_size")]
    """Prompts an optimizer step; each counts with its rollout.n responses."""
    ppo_micro_batch_size: Annotated[Positive | None, AliasOf(".ppo_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; here the same as ppo_micro_batch_size_per_gpu, of each device."""
    ppo_micro_batch_size_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ActsIf(".use_dynamic_bsz", on=(False,)),
    ]
    """Rows a forward and backward pass. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill each micro-batch up to ppo_max_token_len_per_gpu tokens, not to a number of rows."""
    ppo_max_token_len_per_gpu: Annotated[Positive, ActsIf(".use_dynamic_bsz", on=(True,))] = 32768
    """Tokens a micro-batch when use_dynamic_bsz is on."""
    forward_micro_batch_size: Annotated[Positive | None, AliasOf(".forward_micro_batch_size_per_gpu")] = None
    """verl's older key of forward_micro_batch_size_per_gpu."""
    forward_micro_batch_size_per_gpu: Annotated[
        Positive, Inherits(".ppo_micro_batch_size_per_gpu"), ActsIf(".use_dynamic_bsz", on=(False,))
    ]
    """Rows a forward pass when values are computed."""
    forward_max_token_len_per_gpu: Annotated[
        Positive, Inherits(".ppo_max_token_len_per_gpu"), ActsIf(".use_dynamic_bsz", on=(True,))
    ]
    """Tokens such a pass when use_dynamic_bsz is on."""
    ppo_epochs: Annotated[Positive, Inherits("actor_rollout_ref.actor.ppo_epochs")]
    """Passes over each training batch."""
    shuffle: Annotated[bool, Inherits("actor_rollout_ref.actor.shuffle")]
    """Deal rows to mini-batches in a new random order each pass."""
    cliprange_value: Annotated[PositiveFloat | None, EMBODIED_TOO] = 0.5
    """A new value counts as at most this far from the old one in the clipped value loss; null: no clip."""
    value_clip: Annotated[PositiveFloat | None, AliasOf(".cliprange_value")] = None
    """RLinf's name of cliprange_value."""
    huber_delta: Annotated[PositiveFloat | None, EMBODIED_TOO] = None
    """Errors above it count linearly (Huber), which tames outliers; null: every error is squared. (RLinf's key.)"""
    loss_coef: Annotated[PositiveFloat, EMBODIED] = 1.0
    """Embodied runs: weight of the value loss, half the squared error (twice the vf_coef of Stable-Baselines3)."""
    loss_agg_mode: Annotated[LossAggMode | None, Inherits("actor_rollout_ref.actor.loss_agg_mode")]
    """Aggregation of the losses per token; null: token-mean."""
    optim: CriticOptimConfig
    grad_clip: Annotated[PositiveFloat | None, AliasOf(".optim.clip_grad")] = None
    """Another name of optim.clip_grad."""
    strategy: Annotated[Strategy, Inherits("actor_rollout_ref.actor.strategy"), ON_RANKS]
    """Engine of several devices: the actor's."""
    ulysses_sequence_parallel_size: Annotated[Positive, IN_SHARDS] = 1
    """Devices that share each packed row of tokens; needs critic.model.use_remove_padding."""
    megatron: Annotated[CriticMegatronConfig, MEGATRON]
    model: CriticModelConfig
