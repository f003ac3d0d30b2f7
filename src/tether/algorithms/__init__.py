"""The mathematics of PPO and its relatives, as pure functions of tensors.

They work in any training loop: no function takes a config, a model or a process group. Values outside a
``response_mask`` are never read, even if they are NaN. A loss function returns one number per token, and
`aggregate_loss` reduces them to the loss of the mini-batch. `tether.algorithms.shapes` defines the shapes.
"""

import inspect

from tether.algorithms.advantages import ADVANTAGE_ESTIMATORS
from tether.algorithms.advantages.gae import discounted_sums, episodic_gae, length_adaptive_lambda
from tether.algorithms.advantages.groups import informative_rows
from tether.algorithms.advantages.result import Advantages
from tether.algorithms.aggregation import (
    AGGREGATIONS,
    MAX_LOG_RATIO,
    Max,
    Mean,
    Metric,
    Min,
    TokenLoss,
    aggregate_loss,
    masked_mean_ratio,
    merge_metrics,
)
from tether.algorithms.distillation import distillation_loss
from tether.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    kl_penalty,
)
from tether.algorithms.logits import entropy_from_logits, forward_kl_topk, full_kl, sum_pi_squared
from tether.algorithms.masking import count_valid, masked_mean, masked_sum, masked_var, masked_whiten, select
from tether.algorithms.pf_ppo import pf_ppo_indices
from tether.algorithms.policy_losses import POLICY_LOSSES, REQUIRED_AGGREGATION, TOKEN_SELECTIONS, interpolate_proximal
from tether.algorithms.registry import checked, needs
from tether.algorithms.reward_shaping import RunningRewardNormalizer, normalize_rewards_per_batch, overlong_penalty
from tether.algorithms.rollout_correction import (
    importance_metrics,
    importance_weights,
    off_policy_metrics,
    parse_rejection,
    parse_weight_bounds,
    rejection_mask,
    rejection_metrics,
    veto_mask,
)
from tether.algorithms.value import explained_variance, value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "MAX_LOG_RATIO",
    "POLICY_LOSSES",
    "REQUIRED_AGGREGATION",
    "TOKEN_SELECTIONS",
    "AdaptiveKLController",
    "Advantages",
    "FixedKLController",
    "KLController",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "RunningRewardNormalizer",
    "TokenLoss",
    "advantages",
    "aggregate_loss",
    "aggregation",
    "apply_kl_penalty",
    "count_valid",
    "discounted_sums",
    "distillation_loss",
    "entropy_from_logits",
    "episodic_gae",
    "explained_variance",
    "forward_kl_topk",
    "full_kl",
    "importance_metrics",
    "importance_weights",
    "informative_rows",
    "interpolate_proximal",
    "kl_penalty",
    "length_adaptive_lambda",
    "masked_mean",
    "masked_mean_ratio",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "merge_metrics",
    "needs",
    "normalize_rewards_per_batch",
    "off_policy_metrics",
    "overlong_penalty",
    "parse_rejection",
    "parse_weight_bounds",
    "pf_ppo_indices",
    "registry",
    "rejection_mask",
    "rejection_metrics",
    "select",
    "sum_pi_squared",
    "value_loss",
    "veto_mask",
]

# Arguments are checked once, where a caller enters this package; functions of the registries check their own.
globals().update({name: checked(globals()[name]) for name in __all__ if inspect.isfunction(globals()[name])})
