"""`algorithm`: advantages, and the KL penalty in the reward."""

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
"""Estimators whose baseline is the other responses to a prompt, which need `uid` in `tether.algorithms`."""

WITHOUT_PEERS = ("grpo", "grpo_vectorized", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Estimators with which the advantage of a single response is its score, as in verl."""

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
    """verl writes several modes as one string with commas."""
    return tuple(mode.strip() for mode in value.split(",")) if isinstance(value, str) else as_strings(value)


class KlControlConfig(Section):
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: Annotated[Literal["fixed", "adaptive"], KL_REWARD] = "fixed"
    """fixed keeps kl_coef; adaptive moves it so that the KL stays near target_kl."""
    kl_coef: Annotated[NonNegative, KL_REWARD] = 0.001
    """Weight of the penalty; with adaptive, its first value."""
    horizon: Annotated[int, ADAPTIVE] = 10000
    """adaptive: responses over which the weight may change by its whole size."""
    target_kl: Annotated[float, ADAPTIVE] = 0.1
    """adaptive: the KL a response that is aimed at."""


class PfPpoConfig(Section):
    """`algorithm.pf_ppo`: PF-PPO, which draws the batch again by reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """The weight of a row as a function of its score."""
    weight_pow: PositiveFloat = 2.0
    """pow: the exponent."""


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: weights for a sampler whose probabilities differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights, of each token or of each response."""
    rollout_is_threshold: Annotated[
        PositiveFloat | str, NullIsUnset(), Says("a number above 0; or 'lower_upper' in quotes"), WEIGHED
    ] = 2.0
    """Highest weight. 'lower_upper', such as '0.5_5.0', sets weights outside of these bounds to 0 (IcePop)."""
    rollout_is_batch_normalize: Annotated[bool, WEIGHED] = False
    """Divide the weights by their mean."""
    rollout_rs: Annotated[tuple[RejectionMode, ...] | None, BeforeValidator(_as_modes)] = None
    """Rejection of tokens or responses: one mode or several, for example 'token_k1,seq_mean_k3'."""
    rollout_rs_threshold: Annotated[float | str | None, REJECTS] = None
    """Bound of all modes, or a comma list with one for each; a ratio (k1) may be given as 'lower_upper'."""
    rollout_rs_threshold_lower: Annotated[PositiveFloat | None, REJECTS] = None
    """k1: lower bound of the ratio; null: 1 / the upper one."""
    rollout_token_veto_threshold: PositiveFloat | None = None
    """A response with a token whose ratio is below it is rejected as a whole."""
    bypass_mode: bool = False
    """Use the sampler's log-probs as the old ones, and recompute none."""
    loss_type: Annotated[Literal["ppo_clip", "reinforce"], ActsIf(".bypass_mode", on=(True,))] = "ppo_clip"
    """Loss in bypass mode."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: dynamic sampling, which replaces prompts whose responses all score the same."""

    enable: bool = False
    """Drop groups without two different scores and sample further prompts in their place (DAPO)."""
    metric: Annotated[str, NullIsUnset()] = "score"
    """The number that must differ: score (also called seq_reward), or a key that the reward returns, such as acc."""
    max_num_gen_batches: Count = 10
    """Batches of prompts sampled for one step at most; then the step takes what it has. (verl: 0, without end.)"""


class AlgorithmConfig(Section):
    """Advantages, and the KL penalty in the reward."""

    adv_estimator: Annotated[AdvEstimator | OwnFunction, EMBODIED_TOO] = "gae"
    """Advantage estimator; gae has a critic, the others do without. FILE.py:NAME is a function of your own."""
    gamma: Annotated[Fraction, ActsIf(".adv_estimator", on=("gae", "reinforce_plus_plus")), EMBODIED_TOO] = 1.0
    """Discount factor."""
    lam: Annotated[Fraction, GAE, EMBODIED_TOO] = 1.0
    """gae: lambda, between bias (0) and variance (1)."""
    normalize_advantages: Annotated[bool, GAE, EMBODIED_TOO] = True
    """gae: bring the advantages of a rollout to mean 0 and variance 1, as verl always does. (RLinf's key.)"""
    bootstrap_type: Annotated[Literal["standard", "always"], EMBODIED] = "standard"
    """Embodied runs: which episode ends count the value of their last state: time limits, or every end."""
    reward_type: Annotated[
        Literal["action_level", "chunk_level"], ActsIf("policy.num_action_chunks", off=(1,)), EMBODIED_TOO
    ] = "action_level"
    """Embodied runs: one advantage an action, or an action chunk."""
    logprob_type: Annotated[Literal["token_level", "action_level", "chunk_level"], EMBODIED] = "action_level"
    """Embodied runs: one probability ratio a dimension of an action, an action, or an action chunk."""
    entropy_type: Annotated[Literal["token_level", "action_level", "chunk_level"], EMBODIED] = "action_level"
    """Embodied runs: the entropy of a dimension of an action, of an action, or of an action chunk."""
    filter_rewards: Annotated[bool, EMBODIED] = False
    """Embodied runs: learn only from groups of start states whose mean return is within the two bounds. (RLinf's.)"""
    rewards_lower_bound: Annotated[float, FILTERS, EMBODIED_TOO] = 0.0
    """filter_rewards: the lowest mean return. (RLinf's key.)"""
    rewards_upper_bound: Annotated[float, FILTERS, EMBODIED_TOO] = 1.0
    """filter_rewards: the highest mean return. (RLinf's key.)"""
    lam_critic: Annotated[Fraction, Inherits(".lam"), GAE]
    """gae: lambda of the returns that the critic learns; unset: lam. VAPO takes 1. (tether's own key.)"""
    lam_actor_alpha: Annotated[PositiveFloat | None, GAE] = None
    """gae: lambda of the advantages follows the response's length n: 1 - 1 / (alpha n). VAPO takes 0.05. (tether's.)"""
    bootstrap_truncated: Annotated[bool, GAE] = False
    """gae: a response cut by the length limit ends in the critic's value, not in 0. (tether's own key.)"""
    norm_adv_by_std_in_grpo: Annotated[
        bool, ActsIf(".adv_estimator", on=("grpo", "grpo_vectorized", "grpo_passk")), EMBODIED_TOO
    ] = True
    """grpo, grpo_vectorized, grpo_passk: divide by the standard deviation of the group."""
    gdpo_reward_keys: Annotated[Strings, GDPO] = ()
    """gdpo: numbers in the reward's dict, each a component of the reward; score is the score itself."""
    gdpo_reward_weights: Annotated[Floats, GDPO] = ()
    """gdpo: weight of each component; empty: all 1."""
    normalize_rewards: Literal["none", "running", "batch"] = "none"
    """Scale scores to mean 0 and std 1: by all scores so far, or by those of the step. (tether's own key.)"""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty from each token's reward."""
    kl_penalty: Annotated[
        KlKind, Refuses(("full+",), "a reward has no gradient: write full"), ActsIf(".use_kl_in_reward", on=(True,))
    ] = "kl"
    """Estimator of that penalty; full is exact, over the vocabulary, and the same whichever token was sampled."""
    kl_ctrl: KlControlConfig
    use_pf_ppo: bool = False
    """PF-PPO: draw the batch again by reward."""
    pf_ppo: Annotated[PfPpoConfig, ActsIf("algorithm.use_pf_ppo", on=(True,))]
    rollout_correction: RolloutCorrectionConfig
    filter_groups: Annotated[FilterGroupsConfig, ActsIf("algorithm.filter_groups.enable", on=(True,))]
