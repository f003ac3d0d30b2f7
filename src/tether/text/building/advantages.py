"""From rewards to advantages: the estimator, its inputs, and the shaping of rewards before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tether.algorithms import (
    RunningRewardNormalizer,
    length_adaptive_lambda,
    needs,
    overlong_penalty,
)
from tether.batch import TrainBatch
from tether.config import RunConfig
from tether.config.schema import AlgorithmConfig
from tether.loop.own_functions import advantage_estimator, policy_loss
from tether.text.learning.greedy_baseline import GreedyBaseline
from tether.text.learning.reward_components import RewardComponents
from tether.text.learning.reward_shaping import LengthPenalty, RewardShaping
from tether.text.learning.rollouts import value_metrics
from tether.text.sampling.protocol import SamplingParams

OWN_DEFAULT = ("raw",)
"""Estimators that support whitening, but have a different default."""


def asks_for(config: RunConfig, what: str) -> bool:
    """Whether the estimator of a run requires an input, for example ``reward_baselines``."""
    return what in needs(advantage_estimator(config.algorithm.adv_estimator))


def check_own_functions(config: RunConfig) -> None:
    """Load the user's functions for this run, and call each once on a small batch.

    Raises:
        ValueError: a function fails, or an estimator needs a critic's values and the run has no critic.
    """
    policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if asks_for(config, "values") and not config.critic.enable:
        what = f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs values, and there is no critic"
        raise ValueError(f"{what}: set critic.enable=True")


def build_advantage_estimator(algorithm: AlgorithmConfig) -> Callable[[TrainBatch], dict[str, float]]:
    """Return the function that sets `advantages` and `returns` of a batch and returns metrics."""
    estimator = advantage_estimator(algorithm.adv_estimator)
    weights = torch.tensor(algorithm.gdpo_reward_weights) if algorithm.gdpo_reward_weights else None
    alpha = algorithm.lam_actor_alpha
    decoupled = alpha is not None or algorithm.lam_critic != algorithm.lam
    whitening = (
        {"normalize_advantages": algorithm.normalize_advantages} if algorithm.adv_estimator not in OWN_DEFAULT else {}
    )

    def estimate(batch: TrainBatch) -> dict[str, float]:
        result = estimator(
            batch.token_level_rewards,
            batch.response_mask,
            uid=batch.uid,
            values=batch.values,
            bootstrap_values=batch.bootstrap_values,
            old_log_probs=batch.old_log_probs,
            sum_pi_squared=batch.sum_pi_squared,
            rollout_is_weights=batch.rollout_is_weights,
            reward_baselines=batch.reward_baselines,
            reward_components=batch.reward_components,
            component_weights=weights,
            gamma=algorithm.gamma,
            lam=length_adaptive_lambda(batch.response_mask, alpha) if alpha else algorithm.lam,
            critic_lam=algorithm.lam_critic if decoupled else None,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            **whitening,
        )
        batch.advantages, batch.returns = result.advantages, result.returns
        return value_metrics(batch)

    return estimate


def build_reward_shaping(config: RunConfig) -> RewardShaping | None:
    """Return the shaping of rewards; None if there is none."""
    penalty, how, scale = _length_penalty(config), config.algorithm.normalize_rewards, config.reward_model.reward_scale
    if penalty is None and how == "none" and scale == 1:
        return None
    running = RunningRewardNormalizer() if how == "running" else None
    return RewardShaping(penalty, running, per_batch=how == "batch", scale=scale)


def build_greedy_baseline(config: RunConfig) -> GreedyBaseline | None:
    """Return ReMax's baseline; None for other estimators."""
    if not asks_for(config, "reward_baselines"):
        return None
    rollout = config.actor_rollout_ref.rollout
    greedy = SamplingParams(
        max_new_tokens=rollout.response_length,
        max_length=rollout.max_model_len,
        temperature=0.0,
        ignore_eos=rollout.ignore_eos,
    )
    return GreedyBaseline(greedy, _length_penalty(config), config.reward_model.reward_scale)


def build_reward_components(config: RunConfig) -> RewardComponents | None:
    """Return GDPO's reward components; None for other estimators."""
    return RewardComponents(config.algorithm.gdpo_reward_keys) if asks_for(config, "reward_components") else None


def _length_penalty(config: RunConfig) -> LengthPenalty | None:
    buffer = config.reward_model.overlong_buffer
    if not buffer.enable:
        return None
    return partial(
        overlong_penalty,
        max_length=config.data.max_response_length,
        buffer_length=buffer.len,
        penalty_factor=buffer.penalty_factor,
    )
