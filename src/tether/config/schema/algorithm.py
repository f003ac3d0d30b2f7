"""`algorithm`: the advantage estimator, and the KL penalty in the reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from tether.config.schema.section import (
    EMBODIED,
    EMBODIED_TOO,
    ActsIf,
    Count,
    Floats,
    Fraction,
    Inherits,
    NonNegative,
    NullIsUnset,
    OwnFunction,
    PositiveFloat,
    Refuses,
    Says,
    Section,
    Strings,
    as_strings,
)

AdvEstimator = Literal[
    "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_vectorized", "grpo_passk",
    "rloo_vectorized", "remax", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo", "raw",
]  # fmt: skip
COMPARES_RESPONSES = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg",
    "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
"""Estimators that use the other responses to a prompt as the baseline and need `uid` in `tether.algorithms`."""

WITHOUT_PEERS = ("grpo", "grpo_vectorized", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Estimators for which the advantage of a single response is its score, as in verl."""

KlKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full+",
]  # fmt: skip
RejectionMode = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


GAE = ActsIf(".adv_estimator", on=("gae",))
GDPO = ActsIf(".adv_estimator", on=("gdpo",))
WEIGHED = ActsIf(".rollout_is", off=(None,))
REJECTS = ActsIf(".rollout_rs", off=(None,))
FILTERS = ActsIf(".filter_rewards", on=(True,))
ADAPTIVE = ActsIf(".type", on=("adaptive",))
KL_REWARD = ActsIf("algorithm.use_kl_in_reward", on=(True,))


def _as_modes(value: object) -> object:
    """Split verl's comma-separated string of several modes."""
    return tuple(mode.strip() for mode in value.split(",")) if isinstance(value, str) else as_strings(value)


class KlControlConfig(Section):
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: Annotated[Literal["fixed", "adaptive"], KL_REWARD] = "fixed"
    """fixed keeps kl_coef; adaptive adjusts it to keep the KL near target_kl."""
    kl_coef: Annotated[NonNegative, KL_REWARD] = 0.001
    """Weight of the penalty; with adaptive, the initial weight."""
    horizon: Annotated[int, ADAPTIVE] = 10000
    """adaptive: number of responses over which the weight changes by at most about 20%."""
    target_kl: Annotated[float, ADAPTIVE] = 0.1
    """adaptive: target KL per response."""


class PfPpoConfig(Section):
    """`algorithm.pf_ppo`: PF-PPO, which resamples the batch by reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """How the weight of a row depends on its score."""
    weight_pow: PositiveFloat = 2.0
    """pow: the exponent."""


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: corrects for a sampler whose probabilities differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights per token or per response."""
    rollout_is_threshold: Annotated[
        PositiveFloat | str, NullIsUnset(), Says("a number above 0; or 'lower_upper' in quotes"), WEIGHED
    ] = 2.0
    """Maximum weight. 'lower_upper', such as '0.5_5.0', sets weights outside of these bounds to 0 (IcePop)."""
    rollout_is_batch_normalize: Annotated[bool, WEIGHED] = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: Annotated[tuple[RejectionMode, ...] | None, BeforeValidator(_as_modes)] = None
    """Rejection of tokens or responses: one mode or several, for example 'token_k1,seq_mean_k3'."""
    rollout_rs_threshold: Annotated[float | str | None, REJECTS] = None
    """Bound for all modes, or a comma-separated list of one per mode; k1 (a ratio) also accepts 'lower_upper'."""
    rollout_rs_threshold_lower: Annotated[PositiveFloat | None, REJECTS] = None
    """k1: lower bound of the ratio; null: 1 / the upper bound."""
    rollout_token_veto_threshold: PositiveFloat | None = None
    """Reject responses in which the ratio of any token is below this."""
    bypass_mode: bool = False
    """Use the sampler's log-probs as the old log-probs instead of recomputing them."""
    loss_type: Annotated[Literal["ppo_clip", "reinforce"], ActsIf(".bypass_mode", on=(True,))] = "ppo_clip"
    """Loss in bypass mode."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: dynamic sampling, which replaces prompts whose responses all have the same score."""

    enable: bool = False
    """Drop groups whose scores are all equal, and sample further prompts to replace them (DAPO)."""
    metric: Annotated[str, NullIsUnset()] = "score"
    """The number that must differ: score (also called seq_reward), or a key that the reward returns, such as acc."""
    max_num_gen_batches: Count = 10
    """Maximum batches of prompts sampled per step; then the step uses the groups it has. (verl: 0, no limit.)"""


class AlgorithmConfig(Section):
    """The advantage estimator, and the KL penalty in the reward."""

    adv_estimator: Annotated[AdvEstimator | OwnFunction, EMBODIED_TOO] = "gae"
    """Advantage estimator; gae trains a critic, all others need none. FILE.py:NAME is your own function."""
    gamma: Annotated[Fraction, ActsIf(".adv_estimator", on=("gae", "reinforce_plus_plus")), EMBODIED_TOO] = 1.0
    """Discount factor."""
    lam: Annotated[Fraction, GAE, EMBODIED_TOO] = 1.0
    """gae: lambda, which trades bias (0) for variance (1)."""
    normalize_advantages: Annotated[bool, GAE, EMBODIED_TOO] = True
    """gae: normalise the advantages of a rollout to mean 0 and variance 1, as verl always does. (RLinf's key.)"""
    bootstrap_type: Annotated[Literal["standard", "always"], EMBODIED] = "standard"
    """Embodied runs: bootstrap the last state's value at time limits only (standard), or at every episode end."""
    reward_type: Annotated[
        Literal["action_level", "chunk_level"], ActsIf("policy.num_action_chunks", off=(1,)), EMBODIED_TOO
    ] = "action_level"
    """Embodied runs: one advantage per action, or per action chunk."""
    logprob_type: Annotated[Literal["token_level", "action_level", "chunk_level"], EMBODIED] = "action_level"
    """Embodied runs: one probability ratio per dimension of an action, per action, or per action chunk."""
    entropy_type: Annotated[Literal["token_level", "action_level", "chunk_level"], EMBODIED] = "action_level"
    """Embodied runs: one entropy per dimension of an action, per action, or per action chunk."""
    filter_rewards: Annotated[bool, EMBODIED] = False
    """Embodied runs: learn only from groups of start states whose mean return is within the two bounds. (RLinf's.)"""
    rewards_lower_bound: Annotated[float, FILTERS, EMBODIED_TOO] = 0.0
    """filter_rewards: minimum mean return. (RLinf's key.)"""
    rewards_upper_bound: Annotated[float, FILTERS, EMBODIED_TOO] = 1.0
    """filter_rewards: maximum mean return. (RLinf's key.)"""
    lam_critic: Annotated[Fraction, Inherits(".lam"), GAE]
    """gae: lambda of the returns that the critic learns; unset: lam. VAPO uses 1. (tether's own key.)"""
    lam_actor_alpha: Annotated[PositiveFloat | None, GAE] = None
    """gae: lambda of the advantages is 1 - 1 / (alpha n) for n tokens. VAPO uses 0.05. (tether's own key.)"""
    bootstrap_truncated: Annotated[bool, GAE] = False
    """gae: bootstrap responses cut by the length limit with the critic's value instead of 0. (tether's own key.)"""
    norm_adv_by_std_in_grpo: Annotated[
        bool, ActsIf(".adv_estimator", on=("grpo", "grpo_vectorized", "grpo_passk")), EMBODIED_TOO
    ] = True
    """grpo, grpo_vectorized, grpo_passk: divide by the standard deviation of the group."""
    gdpo_reward_keys: Annotated[Strings, GDPO] = ()
    """gdpo: keys of the reward's dict that are the components of the reward; score is the score itself."""
    gdpo_reward_weights: Annotated[Floats, GDPO] = ()
    """gdpo: weight of each component; empty: all 1."""
    normalize_rewards: Literal["none", "running", "batch"] = "none"
    """Normalise scores to mean 0 and std 1 over all scores so far, or over those of the step. (tether's own key.)"""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty from each token's reward."""
    kl_penalty: Annotated[
        KlKind, Refuses(("full+",), "a reward has no gradient: write full"), ActsIf(".use_kl_in_reward", on=(True,))
    ] = "kl"
    """Estimator of that penalty; full is exact, over the vocabulary, and independent of the sampled token."""
    kl_ctrl: KlControlConfig
    use_pf_ppo: bool = False
    """PF-PPO: resample the batch by reward."""
    pf_ppo: Annotated[PfPpoConfig, ActsIf("algorithm.use_pf_ppo", on=(True,))]
    rollout_correction: RolloutCorrectionConfig
    filter_groups: Annotated[FilterGroupsConfig, ActsIf("algorithm.filter_groups.enable", on=(True,))]
