"""`actor_rollout_ref.actor` and `.ref`: how the policy is updated, and the reference it is held to."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.algorithm import KlKind
from tether.config.schema.engine import (
    IN_SHARDS,
    MEGATRON,
    ON_RANKS,
    MegatronConfig,
    RefFsdpConfig,
    RefMegatronConfig,
    RouterReplayConfig,
    Strategy,
    TrainedFsdpConfig,
)
from tether.config.schema.optim import OptimConfig
from tether.config.schema.section import (
    EMBODIED,
    EMBODIED_TOO,
    AboveOne,
    ActsIf,
    AliasOf,
    Fraction,
    Inherits,
    NonNegative,
    NullIsUnset,
    OwnFunction,
    Positive,
    PositiveFloat,
    Refuses,
    Section,
)

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum-norm",
    "masked_mean_ratio",
]  # fmt: skip
LossMode = Literal[
    "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro", "topr",
    "m2po", "bypass_mode", "decoupled",
]  # fmt: skip
Decay = Literal["constant", "linear"]
CLIP_COV = ActsIf(".loss_mode", on=("clip_cov",), own_function=False)
CLIPPED = ActsIf(".policy_loss.loss_mode", off=("gpg", "sapo", "kl_cov", "dro", "topr", "m2po"))
SAPO = ActsIf(".policy_loss.loss_mode", on=("sapo",))
KL_LOSS = ActsIf(".use_kl_loss", on=(True,))


class PolicyLossConfig(Section):
    """`actor.policy_loss`: which policy loss."""

    loss_mode: LossMode | OwnFunction = "vanilla"
    """Policy loss; vanilla is PPO's clipped surrogate with dual clip, decoupled RLinf's decoupled_actor_critic."""
    clip_cov_ratio: Annotated[Fraction, CLIP_COV] = 2e-4
    """clip_cov: share of a mini-batch's tokens whose gradient is dropped; at least one token."""
    clip_cov_lb: Annotated[float, CLIP_COV] = 1.0
    """clip_cov: only tokens of a higher covariance are dropped."""
    clip_cov_ub: Annotated[float, CLIP_COV] = 5.0
    """clip_cov: only tokens of a lower covariance are dropped."""
    kl_cov_ratio: Annotated[Fraction, ActsIf(".loss_mode", on=("kl_cov",), own_function=False)] = 2e-4
    """kl_cov: share of a mini-batch's tokens that get a KL term; at least one token."""
    ppo_kl_coef: Annotated[NonNegative, ActsIf(".loss_mode", on=("kl_cov",))] = 0.1
    """kl_cov: weight of that term."""
    dro_beta: Annotated[PositiveFloat, NullIsUnset(), ActsIf(".loss_mode", on=("dro",))] = 1.0
    """dro: weight of the quadratic penalty on the log-ratio. verl has no default."""
    m2_threshold: Annotated[NonNegative, ActsIf(".loss_mode", on=("m2po",), own_function=False)] = 0.04
    """m2po: the largest mean square of the log-ratios; tokens with the largest ones are dropped until it holds."""
    behave_weight_threshold: Annotated[PositiveFloat | None, ActsIf(".loss_mode", on=("decoupled",))] = None
    """decoupled: tokens whose behaviour weight p_old / p_rollout is above it are dropped; null keeps all. (RLinf's.)"""


class ActorConfig(Section):
    """The policy's update."""

    ppo_mini_batch_size: Annotated[Positive, EMBODIED_TOO] = 256
    """Prompts an optimizer step; each counts with its rollout.n responses."""
    ppo_micro_batch_size: Annotated[Positive | None, AliasOf(".ppo_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; here the same as ppo_micro_batch_size_per_gpu, of each device."""
    ppo_micro_batch_size_per_gpu: Annotated[
        Positive, NullIsUnset(), ActsIf(".use_dynamic_bsz", on=(False,)), EMBODIED_TOO
    ] = 8
    """Rows a forward and backward pass. Changes memory and speed, never the gradient. verl has no default."""
    use_dynamic_bsz: bool = False
    """Fill each micro-batch up to ppo_max_token_len_per_gpu tokens, not to a number of rows."""
    ppo_max_token_len_per_gpu: Annotated[Positive, ActsIf(".use_dynamic_bsz", on=(True,))] = 16384
    """Tokens a micro-batch when use_dynamic_bsz is on."""
    ppo_epochs: Annotated[Positive, EMBODIED_TOO] = 1
    """Passes over each training batch."""
    shuffle: Annotated[bool, EMBODIED_TOO] = False
    """Deal rows to mini-batches in a new random order each pass."""
    clip_ratio: Annotated[NonNegative, CLIPPED, EMBODIED_TOO] = 0.2
    """PPO's clip range: ratios are clipped to [1 - clip_ratio, 1 + clip_ratio]; in dppo_*, the largest divergence."""
    clip_ratio_low: Annotated[NonNegative, Inherits(".clip_ratio"), CLIPPED, EMBODIED_TOO]
    """Lower side of the clip range. In verl it is 0.2 whatever clip_ratio says."""
    clip_ratio_high: Annotated[NonNegative, Inherits(".clip_ratio"), CLIPPED, EMBODIED_TOO]
    """Upper side of the clip range. In verl it is 0.2 whatever clip_ratio says."""
    clip_ratio_c: Annotated[
        AboveOne | None,
        ActsIf(".policy_loss.loss_mode", on=("vanilla", "decoupled", "bypass_mode", "dppo_tv", "dppo_kl")),
        EMBODIED_TOO,
    ] = 3.0
    """Dual clip: with a negative advantage a loss is at most -clip_ratio_c x advantage; in dppo_*, largest weight."""
    clip_ratio_schedule: Annotated[Decay, CLIPPED, EMBODIED_TOO] = "constant"
    """linear: both sides of the clip range fall to 0 over the training steps. (tether's own key.)"""
    loss_agg_mode: Annotated[LossAggMode | None, EMBODIED_TOO] = None
    """Aggregation of the losses per token; null: as loss_mode, or auto_reset=False, demands, else token-mean."""
    loss_scale_factor: Annotated[
        PositiveFloat | None,
        ActsIf(".loss_agg_mode", on=("seq-mean-token-sum-norm", "token-sum-norm", "masked_mean_ratio")),
        EMBODIED_TOO,
    ] = None
    """Modes with -norm divide by it, masked_mean_ratio multiplies by it; null: data.max_response_length."""
    entropy_coeff: Annotated[float, EMBODIED_TOO] = 0.0
    """Weight of the entropy bonus."""
    entropy_coeff_schedule: Annotated[Decay, ActsIf(".entropy_coeff", off=(0.0,)), EMBODIED_TOO] = "constant"
    """linear: the weight falls to 0 over the training steps. (tether's own key.)"""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""
    kl_loss_coef: Annotated[NonNegative, KL_LOSS] = 0.001
    """Weight of that KL term."""
    kl_loss_type: Annotated[KlKind, Refuses(("full+",), "full already has the exact gradient"), KL_LOSS] = "low_var_kl"
    """Estimator of that KL term; full is exact, over the vocabulary, and runs the reference in each update."""
    policy_loss: Annotated[PolicyLossConfig, EMBODIED_TOO]
    early_stop_imp_ratio: PositiveFloat | None = None
    """A mini-batch whose mean importance ratio is above it makes no optimizer step; null: each does. (RLinf's key.)"""
    target_kl: Annotated[PositiveFloat | None, EMBODIED] = None
    """Embodied runs: how far (KL) the passes over a rollout take the policy from the one that sampled it."""
    target_kl_control: Annotated[Literal["stop", "lr"], ActsIf(".target_kl", off=(None,)), EMBODIED_TOO] = "stop"
    """target_kl: stop ends the passes above it; lr moves the learning rate towards it. (tether's own key.)"""
    optim: Annotated[OptimConfig, EMBODIED_TOO]
    grad_clip: Annotated[PositiveFloat | None, AliasOf(".optim.clip_grad")] = None
    """Another name of optim.clip_grad."""
    strategy: Annotated[Strategy, ON_RANKS] = "fsdp"
    """Engine of several devices: FSDP2 (fsdp and fsdp2 are the same here) or megatron; one device needs neither."""
    ulysses_sequence_parallel_size: Annotated[Positive, IN_SHARDS] = 1
    """Devices that share each packed row of tokens (Ulysses): for rows that are too long for one."""
    fsdp_config: TrainedFsdpConfig
    megatron: Annotated[MegatronConfig, MEGATRON]
    router_replay: RouterReplayConfig
    use_remove_padding: Annotated[bool | None, AliasOf("actor_rollout_ref.model.use_remove_padding")] = None
    """Another name of model.use_remove_padding."""
    tau_pos: Annotated[PositiveFloat, SAPO, EMBODIED_TOO] = 1.0
    """sapo: temperature where the advantage is positive."""
    tau_neg: Annotated[PositiveFloat, SAPO, EMBODIED_TOO] = 1.05
    """sapo: temperature where it is not."""


class RefConfig(Section):
    """The frozen reference of algorithm.use_kl_in_reward and actor.use_kl_loss, or the teacher of distillation."""

    log_prob_micro_batch_size: Annotated[Positive | None, AliasOf(".log_prob_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; here the same as log_prob_micro_batch_size_per_gpu, of each device."""
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(False,)),
    ]
    """Rows a forward pass."""
    log_prob_use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill each forward pass up to log_prob_max_token_len_per_gpu tokens."""
    log_prob_max_token_len_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(True,)),
    ]
    """Tokens a forward pass when log_prob_use_dynamic_bsz is on."""
    strategy: Annotated[Strategy, Inherits("actor_rollout_ref.actor.strategy"), ON_RANKS]
    """Engine of several devices: the actor's."""
    ulysses_sequence_parallel_size: Annotated[
        Positive, Inherits("actor_rollout_ref.actor.ulysses_sequence_parallel_size"), IN_SHARDS
    ]
    """Devices that share each packed row of tokens."""
    fsdp_config: RefFsdpConfig
    megatron: Annotated[RefMegatronConfig, MEGATRON]
