"""Advantage estimators, which compute advantages and returns from token rewards and a mask.

Every estimator can be called with the keywords of all of them (`tether.algorithms.registry`). The name of a new
estimator must also be added to `AdvEstimator` of `tether.config.schema.algorithm`.
"""

from collections.abc import Callable

from tether.algorithms.advantages.gae import discounted_returns, gae, raw, reinforce_plus_plus, remax
from tether.algorithms.advantages.group_relative import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    grpo_vectorized,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    rloo_vectorized,
)
from tether.algorithms.advantages.result import Advantages
from tether.algorithms.advantages.token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from tether.algorithms.registry import uniform

__all__ = ["ADVANTAGE_ESTIMATORS", "discounted_returns"]

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Advantages]] = uniform(
    {
        "gae": gae,
        "grpo": grpo,
        "grpo_vectorized": grpo_vectorized,
        "grpo_passk": grpo_passk,
        "rloo": rloo,
        "rloo_vectorized": rloo_vectorized,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
        "remax": remax,
        "opo": opo,
        "gpg": gpg,
        "gdpo": gdpo,
        "optimal_token_baseline": optimal_token_baseline,
        "tir_optimal_token_baseline": tir_optimal_token_baseline,
        "raw": raw,
    },
    meaning={
        "values": "[B, T]: the critic's estimate before each token",
        "uid": "[B]: the prompt group of each row, as integers or anything hashable",
        "old_log_probs": "[B, T]: log-probability of each sampled token",
        "sum_pi_squared": "[B, T]: sum over the vocabulary of the squared probabilities",
        "reward_baselines": "[B]: the score of a greedy answer to the prompt of each row",
        "reward_components": "[B, R]: the scores of each row, one a component",
    },
)
