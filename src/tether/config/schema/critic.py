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
    """Train a critic; unset: only if adv_estimator is gae."""
    ppo_mini_batch_size: Annotated[Positive, Inherits("actor_rollout_ref.actor.ppo_mini_batch_size")]
    """Prompts per optimizer step, each with its rollout.n responses."""
    ppo_micro_batch_size: Annotated[Positive | None, AliasOf(".ppo_micro_batch_size_per_gpu")] = None
    """verl's older key, which counts over all devices; here the same as ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ActsIf(".use_dynamic_bsz", on=(False,)),
    ]
    """Rows per forward and backward pass. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill micro-batches up to ppo_max_token_len_per_gpu tokens instead of a fixed number of rows."""
    ppo_max_token_len_per_gpu: Annotated[Positive, ActsIf(".use_dynamic_bsz", on=(True,))] = 32768
    """Tokens per micro-batch with use_dynamic_bsz."""
    forward_micro_batch_size: Annotated[Positive | None, AliasOf(".forward_micro_batch_size_per_gpu")] = None
    """verl's older name of forward_micro_batch_size_per_gpu."""
    forward_micro_batch_size_per_gpu: Annotated[
        Positive, Inherits(".ppo_micro_batch_size_per_gpu"), ActsIf(".use_dynamic_bsz", on=(False,))
    ]
    """Rows per forward pass that computes values."""
    forward_max_token_len_per_gpu: Annotated[
        Positive, Inherits(".ppo_max_token_len_per_gpu"), ActsIf(".use_dynamic_bsz", on=(True,))
    ]
    """Tokens per forward pass that computes values, with use_dynamic_bsz."""
    ppo_epochs: Annotated[Positive, Inherits("actor_rollout_ref.actor.ppo_epochs")]
    """Passes over each training batch."""
    shuffle: Annotated[bool, Inherits("actor_rollout_ref.actor.shuffle")]
    """Assign rows to mini-batches in a new random order in each pass."""
    cliprange_value: Annotated[PositiveFloat | None, EMBODIED_TOO] = 0.5
    """Clip range of new values around old ones in the value loss; null: no clip."""
    value_clip: Annotated[PositiveFloat | None, AliasOf(".cliprange_value")] = None
    """RLinf's name of cliprange_value."""
    huber_delta: Annotated[PositiveFloat | None, EMBODIED_TOO] = None
    """Errors above this count linearly (Huber), which limits outliers; null: every error is squared. (RLinf's key.)"""
    loss_coef: Annotated[PositiveFloat, EMBODIED] = 1.0
    """Embodied runs: weight of the value loss, half the squared error (twice the vf_coef of Stable-Baselines3)."""
    loss_agg_mode: Annotated[LossAggMode | None, Inherits("actor_rollout_ref.actor.loss_agg_mode")]
    """Aggregation of the losses per token; null: token-mean."""
    optim: CriticOptimConfig
    grad_clip: Annotated[PositiveFloat | None, AliasOf(".optim.clip_grad")] = None
    """Alias of optim.clip_grad."""
    strategy: Annotated[Strategy, Inherits("actor_rollout_ref.actor.strategy"), ON_RANKS]
    """Engine for several devices: that of the actor."""
    ulysses_sequence_parallel_size: Annotated[Positive, IN_SHARDS] = 1
    """Devices that share each packed row of tokens; needs critic.model.use_remove_padding."""
    megatron: Annotated[CriticMegatronConfig, MEGATRON]
    model: CriticModelConfig
