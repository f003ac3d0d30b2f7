"""`actor_rollout_ref.actor` and `.ref`: the policy's update, and the reference for its KL penalty."""

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
    """`actor.policy_loss`: the policy loss."""

    loss_mode: LossMode | OwnFunction = "vanilla"
    """Policy loss; vanilla is PPO's clipped loss with dual clip, decoupled is RLinf's decoupled_actor_critic."""
    clip_cov_ratio: Annotated[Fraction, CLIP_COV] = 2e-4
    """clip_cov: share of a mini-batch's tokens whose gradient is dropped; at least one token."""
    clip_cov_lb: Annotated[float, CLIP_COV] = 1.0
    """clip_cov: lower bound of the covariance of dropped tokens."""
    clip_cov_ub: Annotated[float, CLIP_COV] = 5.0
    """clip_cov: upper bound of the covariance of dropped tokens."""
    kl_cov_ratio: Annotated[Fraction, ActsIf(".loss_mode", on=("kl_cov",), own_function=False)] = 2e-4
    """kl_cov: share of a mini-batch's tokens with a KL term; at least one token."""
    ppo_kl_coef: Annotated[NonNegative, ActsIf(".loss_mode", on=("kl_cov",))] = 0.1
    """kl_cov: weight of the KL term."""
    dro_beta: Annotated[PositiveFloat, NullIsUnset(), ActsIf(".loss_mode", on=("dro",))] = 1.0
    """dro: weight of the quadratic penalty on the log-ratio. verl has no default."""
    m2_threshold: Annotated[NonNegative, ActsIf(".loss_mode", on=("m2po",), own_function=False)] = 0.04
    """m2po: maximum mean square of the log-ratios; tokens with the largest ones are dropped to reach it."""
    behave_weight_threshold: Annotated[PositiveFloat | None, ActsIf(".loss_mode", on=("decoupled",))] = None
    """decoupled: drop tokens whose behaviour weight p_old / p_rollout is above this; null keeps all. (RLinf's key.)"""


class ActorConfig(Section):
    """The update of the policy."""

    ppo_mini_batch_size: Annotated[Positive, EMBODIED_TOO] = 256
    """Prompts per optimizer step, each with its rollout.n responses."""
    ppo_micro_batch_size: Annotated[Positive | None, AliasOf(".ppo_micro_batch_size_per_gpu")] = None
    """verl's older key, which counts over all devices; here the same as ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: Annotated[
        Positive, NullIsUnset(), ActsIf(".use_dynamic_bsz", on=(False,)), EMBODIED_TOO
    ] = 8
    """Rows per forward and backward pass. Changes memory and speed, never the gradient. verl has no default."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches up to ppo_max_token_len_per_gpu tokens instead of a fixed number of rows."""
    ppo_max_token_len_per_gpu: Annotated[Positive, ActsIf(".use_dynamic_bsz", on=(True,))] = 16384
    """Tokens per micro-batch with use_dynamic_bsz."""
    ppo_epochs: Annotated[Positive, EMBODIED_TOO] = 1
    """Passes over each training batch."""
    shuffle: Annotated[bool, EMBODIED_TOO] = False
    """Assign rows to mini-batches in a new random order in each pass."""
    clip_ratio: Annotated[NonNegative, CLIPPED, EMBODIED_TOO] = 0.2
    """PPO's clip range: ratios are clipped to [1 - clip_ratio, 1 + clip_ratio]; dppo_*: the maximum divergence."""
    clip_ratio_low: Annotated[NonNegative, Inherits(".clip_ratio"), CLIPPED, EMBODIED_TOO]
    """Lower side of the clip range. In verl it is 0.2 whatever the value of clip_ratio."""
    clip_ratio_high: Annotated[NonNegative, Inherits(".clip_ratio"), CLIPPED, EMBODIED_TOO]
    """Upper side of the clip range. In verl it is 0.2 whatever the value of clip_ratio."""
    clip_ratio_c: Annotated[
        AboveOne | None,
        ActsIf(".policy_loss.loss_mode", on=("vanilla", "decoupled", "bypass_mode", "dppo_tv", "dppo_kl")),
        EMBODIED_TOO,
    ] = 3.0
    """Dual clip: with a negative advantage, a loss is at most -clip_ratio_c x advantage; dppo_*: the maximum weight."""
    clip_ratio_schedule: Annotated[Decay, CLIPPED, EMBODIED_TOO] = "constant"
    """linear: both sides of the clip range decay to 0 over the training steps. (tether's own key.)"""
    loss_agg_mode: Annotated[LossAggMode | None, EMBODIED_TOO] = None
    """Aggregation of the losses per token; null: as required by loss_mode or auto_reset=False, else token-mean."""
    loss_scale_factor: Annotated[
        PositiveFloat | None,
        ActsIf(".loss_agg_mode", on=("seq-mean-token-sum-norm", "token-sum-norm", "masked_mean_ratio")),
        EMBODIED_TOO,
    ] = None
    """Divisor of modes with -norm, factor of masked_mean_ratio; null: data.max_response_length."""
    entropy_coeff: Annotated[float, EMBODIED_TOO] = 0.0
    """Weight of the entropy bonus."""
    entropy_coeff_schedule: Annotated[Decay, ActsIf(".entropy_coeff", off=(0.0,)), EMBODIED_TOO] = "constant"
    """linear: the weight decays to 0 over the training steps. (tether's own key.)"""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""
    kl_loss_coef: Annotated[NonNegative, KL_LOSS] = 0.001
    """Weight of that KL term."""
    kl_loss_type: Annotated[KlKind, Refuses(("full+",), "full already has the exact gradient"), KL_LOSS] = "low_var_kl"
    """Estimator of that KL term; full is exact, over the vocabulary, and runs the reference in each update."""
    policy_loss: Annotated[PolicyLossConfig, EMBODIED_TOO]
    early_stop_imp_ratio: PositiveFloat | None = None
    """Skip the optimizer step of a mini-batch whose mean importance ratio exceeds this; null: never. (RLinf's key.)"""
    target_kl: Annotated[PositiveFloat | None, EMBODIED] = None
    """Embodied runs: target or limit of the KL between the updated policy and the one that sampled the rollout."""
    target_kl_control: Annotated[Literal["stop", "lr"], ActsIf(".target_kl", off=(None,)), EMBODIED_TOO] = "stop"
    """target_kl: stop ends the passes above it; lr adapts the learning rate to reach it. (tether's own key.)"""
    optim: Annotated[OptimConfig, EMBODIED_TOO]
    grad_clip: Annotated[PositiveFloat | None, AliasOf(".optim.clip_grad")] = None
    """Alias of optim.clip_grad."""
    strategy: Annotated[Strategy, ON_RANKS] = "fsdp"
    """Engine for several devices: FSDP2 (fsdp and fsdp2 are the same here) or megatron; unused with one device."""
    ulysses_sequence_parallel_size: Annotated[Positive, IN_SHARDS] = 1
    """Devices that share each packed row of tokens (Ulysses), for rows that are too long for one device."""
    fsdp_config: TrainedFsdpConfig
    megatron: Annotated[MegatronConfig, MEGATRON]
    router_replay: RouterReplayConfig
    use_remove_padding: Annotated[bool | None, AliasOf("actor_rollout_ref.model.use_remove_padding")] = None
    """Alias of model.use_remove_padding."""
    tau_pos: Annotated[PositiveFloat, SAPO, EMBODIED_TOO] = 1.0
    """sapo: temperature for positive advantages."""
    tau_neg: Annotated[PositiveFloat, SAPO, EMBODIED_TOO] = 1.05
    """sapo: temperature for all other advantages."""


class RefConfig(Section):
    """The frozen reference for algorithm.use_kl_in_reward and actor.use_kl_loss, or the teacher of distillation."""

    log_prob_micro_batch_size: Annotated[Positive | None, AliasOf(".log_prob_micro_batch_size_per_gpu")] = None
    """verl's older key, which counts over all devices; here the same as log_prob_micro_batch_size_per_gpu."""
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(False,)),
    ]
    """Rows per forward pass."""
    log_prob_use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill forward passes up to log_prob_max_token_len_per_gpu tokens."""
    log_prob_max_token_len_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(True,)),
    ]
    """Tokens per forward pass with log_prob_use_dynamic_bsz."""
    strategy: Annotated[Strategy, Inherits("actor_rollout_ref.actor.strategy"), ON_RANKS]
    """Engine for several devices: that of the actor."""
    ulysses_sequence_parallel_size: Annotated[
        Positive, Inherits("actor_rollout_ref.actor.ulysses_sequence_parallel_size"), IN_SHARDS
    ]
    """Devices that share each packed row of tokens."""
    fsdp_config: RefFsdpConfig
    megatron: Annotated[RefMegatronConfig, MEGATRON]
