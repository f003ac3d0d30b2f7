"""`actor_rollout_ref.actor` and `.ref`: how the policy is updated, and the reference it is held to."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.algorithm import KlKind
from tether.config.schema.engine import (
    CheckpointConfig,
    FsdpConfig,
    ProfilerConfig,
    RefFsdpConfig,
)
from tether.config.schema.optim import OptimConfig
from tether.config.schema.section import (
    AboveOne,
    AliasOf,
    Fraction,
    Inherits,
    NonNegative,
    NullIsUnset,
    OwnFunction,
    Positive,
    PositiveFloat,
    Section,
)

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "masked_mean_ratio"
]  # fmt: skip
LossMode = Literal[
    "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "bypass_mode", "decoupled"
]  # fmt: skip


class PolicyLossConfig(Section):
    """`actor.policy_loss`: which policy loss."""

    loss_mode: LossMode | OwnFunction = "vanilla"
    """Policy loss; vanilla is PPO's clipped surrogate with dual clip, decoupled RLinf's decoupled_actor_critic."""
    clip_cov_ratio: Fraction = 2e-4
    """clip_cov: share of a mini-batch's tokens whose gradient is dropped; at least one token."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens of a higher covariance are dropped."""
    clip_cov_ub: float = 5.0
    """clip_cov: only tokens of a lower covariance are dropped."""
    kl_cov_ratio: Fraction = 2e-4
    """kl_cov: share of a mini-batch's tokens that get a KL term; at least one token."""
    ppo_kl_coef: NonNegative = 0.1
    """kl_cov: weight of that term."""
    behave_weight_threshold: PositiveFloat | None = None
    """decoupled: tokens whose behaviour weight p_old / p_rollout is above it are dropped; null keeps all. (RLinf's.)"""


class ActorConfig(Section):
    """The policy's update."""

    ppo_mini_batch_size: Positive = 256
    """Prompts an optimizer step; each counts with its rollout.n responses."""
    ppo_micro_batch_size: Annotated[Positive | None, AliasOf(".ppo_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; on one device the same as ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: Annotated[Positive, NullIsUnset()] = 8
    """Rows a forward and backward pass. Changes memory and speed, never the gradient. verl has no default."""
    use_dynamic_bsz: bool = False
    """Fill each micro-batch up to ppo_max_token_len_per_gpu tokens, not to a number of rows."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens a micro-batch when use_dynamic_bsz is on."""
    ppo_epochs: Positive = 1
    """Passes over each training batch."""
    shuffle: bool = False
    """Deal rows to mini-batches in a new random order each pass."""
    clip_ratio: NonNegative = 0.2
    """PPO's clip range: the probability ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: Annotated[NonNegative, Inherits(".clip_ratio")]
    """Lower side of the clip range. In verl it is 0.2 whatever clip_ratio says."""
    clip_ratio_high: Annotated[NonNegative, Inherits(".clip_ratio")]
    """Upper side of the clip range. In verl it is 0.2 whatever clip_ratio says."""
    clip_ratio_c: AboveOne | None = 3.0
    """Dual clip: with a negative advantage a token's loss is at most -clip_ratio_c x advantage; null: no such limit."""
    loss_agg_mode: LossAggMode | None = None
    """How losses of tokens become one number; null: as loss_mode, or auto_reset=False, demands, else token-mean."""
    loss_scale_factor: PositiveFloat | None = None
    """seq-mean-token-sum-norm divides by it, masked_mean_ratio multiplies by it; null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of that KL term."""
    kl_loss_type: KlKind = "low_var_kl"
    """Estimator of that KL term; full is exact, over the vocabulary, and runs the reference in each update."""
    policy_loss: PolicyLossConfig
    early_stop_imp_ratio: PositiveFloat | None = None
    """A mini-batch whose mean importance ratio is above it makes no optimizer step; null: each does. (RLinf's key.)"""
    target_kl: PositiveFloat | None = None
    """Embodied runs: how far (KL) the passes over a rollout take the policy from the one that sampled it."""
    target_kl_control: Literal["stop", "lr"] = "stop"
    """target_kl: stop ends the passes above it; lr moves the learning rate towards it. (tether's own key.)"""
    optim: OptimConfig
    grad_clip: Annotated[PositiveFloat | None, AliasOf(".optim.clip_grad")] = None
    """Another name of optim.clip_grad."""
    fsdp_config: FsdpConfig
    use_remove_padding: Annotated[bool | None, AliasOf("actor_rollout_ref.model.use_remove_padding")] = None
    """Another name of model.use_remove_padding."""
    ulysses_sequence_parallel_size: Positive = 1
    """Ranks that share one sequence; needs use_remove_padding."""
    checkpoint: CheckpointConfig
    data_loader_seed: int | None = 42
    """verl's seed of shuffle."""
    calculate_entropy: bool = False
    """Log the entropy even where it has no weight in the loss."""
    use_torch_compile: bool = True
    """Compile the loss's small kernels."""
    use_fused_kernels: Annotated[bool, Inherits("actor_rollout_ref.model.use_fused_kernels")]
    """Fused log-prob and entropy."""
    entropy_from_logits_with_chunking: bool = False
    """Compute entropy a block of tokens at a time."""
    entropy_checkpointing: bool = False
    """Recompute entropy in the backward pass."""
    calculate_sum_pi_squared: bool = False
    """Sum of squared probabilities, for the optimal token baseline."""
    sum_pi_squared_checkpointing: bool = False
    """Recompute that sum in the backward pass."""
    tau_pos: PositiveFloat = 1.0
    """sapo: temperature where the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    """sapo: temperature where it is not."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower."""
    rollout_n: Annotated[int, Inherits("actor_rollout_ref.rollout.n")]
    """verl's copy of rollout.n."""
    profiler: ProfilerConfig


class RefConfig(Section):
    """The frozen reference: used with algorithm.use_kl_in_reward or actor.use_kl_loss."""

    log_prob_micro_batch_size: Annotated[Positive | None, AliasOf(".log_prob_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; on one device the same as log_prob_micro_batch_size_per_gpu."""
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive, Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    ]
    """Rows a forward pass."""
    log_prob_use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill each forward pass up to log_prob_max_token_len_per_gpu tokens."""
    log_prob_max_token_len_per_gpu: Annotated[Positive, Inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")]
    """Tokens a forward pass when log_prob_use_dynamic_bsz is on."""
    fsdp_config: RefFsdpConfig
    ulysses_sequence_parallel_size: Annotated[
        Positive, Inherits("actor_rollout_ref.actor.ulysses_sequence_parallel_size")
    ]
    """Ranks that share one sequence."""
    use_torch_compile: Annotated[bool, Inherits("actor_rollout_ref.actor.use_torch_compile")]
    """Compile small kernels."""
    entropy_from_logits_with_chunking: bool = False
    """Compute entropy a block of tokens at a time."""
    entropy_checkpointing: bool = False
    """Recompute entropy in the backward pass."""
    rollout_n: Annotated[int, Inherits("actor_rollout_ref.rollout.n")]
    """verl's copy of rollout.n."""
    profiler: ProfilerConfig
