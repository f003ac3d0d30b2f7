"""From scores to rewards to advantages.

Scores are scaled, penalised for length and normalised, and become rewards, from which the KL penalty is subtracted.
ReMax's baseline is the score of a greedy response to each prompt (arXiv 2310.10505). GDPO reads several values that a
reward returns as separate components (arXiv 2601.05242).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from tether.algorithms import (
    AdaptiveKLController,
    Advantages,
    FixedKLController,
    RunningRewardNormalizer,
    apply_kl_penalty,
    explained_variance,
    kl_penalty,
    length_adaptive_lambda,
    masked_sum,
    needs,
    normalize_rewards_per_batch,
    overlong_penalty,
)
from tether.batch import Prompt, TrainBatch, filled, on_last_token
from tether.config.schema import ActorConfig, AlgorithmConfig
from tether.loop.own_functions import advantage_estimator, policy_loss
from tether.metrics.data import group_metrics
from tether.text.learning.branches import estimate_by_branch
from tether.text.learning.collector import Collector
from tether.text.rewards.config import OverlongBufferConfig, RewardModelConfig
from tether.text.rewards.outcome import RewardOutcome, Score, is_float32
from tether.text.sampling.config import RolloutConfig
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.types import StateDict

LengthPenalty = Callable[[Tensor], Tensor]
"""Maps response lengths [B] in tokens to the penalties [B], at most 0, that are added to the scores."""


@dataclass(frozen=True)
class RewardShaping:
    """Shapes the scores of rows that have one; at most one of the two normalisations is enabled."""

    length_penalty: LengthPenalty | None = None
    running: RunningRewardNormalizer | None = None
    """Normalises by the statistics of all scores so far, including those of this step."""
    per_batch: bool = False
    """Whether to normalise by the statistics of this step's scores."""
    scale: float = 1.0
    """Factor that is applied to every score first."""

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Set `token_level_rewards` from `token_level_scores`, on the last token of each row, and return metrics."""
        metrics: dict[str, float] = {}
        episodes = batch.episodes()
        scores = self.scale * masked_sum(episodes.token_level_scores, episodes.response_mask, dim=-1)
        if self.length_penalty:
            penalty = self.length_penalty(episodes.response_length)
            scores = scores + penalty
            metrics |= penalty_metrics(penalty[episodes.scored])
        if self.running:
            self.running.update(scores, episodes.scored)
            scores = self.running.normalize(scores, episodes.scored)
            metrics |= {"reward/running_mean": self.running.mean, "reward/running_std": self.running.std}
        if self.per_batch:
            scores = normalize_rewards_per_batch(scores, episodes.scored)
        scores = scores if batch.episode is None else scores[batch.episode]
        batch.token_level_rewards = on_last_token(scores, batch.response_mask)
        return metrics

    def state_dict(self) -> StateDict:
        return self.running.state_dict() if self.running else {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the running statistics; if a resumed run newly enables normalisation, it starts without any."""
        if self.running and state:
            self.running.load_state_dict(state)


def penalty_metrics(penalty: Tensor) -> dict[str, float]:
    """Return metrics of the size and frequency of the length penalty; empty if no row has a score."""
    if not len(penalty):
        return {}
    return {
        "reward/overlong_penalty_mean": float(penalty.double().mean()),
        "reward/overlong_fraction": float((penalty < 0).double().mean()),
    }


@dataclass(frozen=True)
class KLReward:
    """Subtracts ``coefficient * kl`` from the reward of each token; the controller adapts after each step."""

    controller: FixedKLController | AdaptiveKLController
    kind: str

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Subtract the KL from the reference from `token_level_rewards` and return metrics."""
        coefficient, mask = self.controller.value, batch.response_mask
        if self.kind == "full":
            token_kl = filled(batch.full_kl)
        else:
            token_kl = kl_penalty(filled(batch.old_log_probs), filled(batch.ref_log_probs), self.kind, mask)
        batch.token_level_rewards, kl = apply_kl_penalty(
            filled(batch.token_level_rewards), token_kl, mask, kl_coef=coefficient
        )
        self.controller.update(float(kl), int(batch.episodes().scored.sum()))
        return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coefficient}

    def state_dict(self) -> StateDict:
        return self.controller.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self.controller.load_state_dict(state)


@dataclass(frozen=True)
class GreedyBaseline:
    """Scores one greedy response to each prompt in the same way as the sampled responses."""

    sampling: SamplingParams
    """Sampling parameters with n = 1 and temperature 0."""
    length_penalty: LengthPenalty | None = None
    """The length penalty of reward shaping, applied to greedy responses as well."""
    scale: float = 1.0
    """The factor on scores of reward shaping."""

    def add_to(
        self, batch: TrainBatch, prompts: Sequence[Prompt], collector: Collector, key: NoiseKey
    ) -> dict[str, float]:
        """Set `reward_baselines`, and exclude the rows of a prompt whose greedy response has no score.

        Args:
            batch: the sampled responses; `uid` is the index of the prompt.
            prompts: the prompts of the step.
            collector: samples from the policy that sampled the batch, and scores.
            key: noise key of the step; a greedy response needs no noise.

        Returns:
            Metrics of the baseline and its cost.
        """
        greedy = collector.collect(prompts, self.sampling, key)
        length = greedy.rollout.response_length
        baselines = self.scale * greedy.scores
        if self.length_penalty:
            baselines = baselines + self.length_penalty(length)
        row_baselines = baselines[batch.uid]
        batch.leave_out(row_baselines.isnan())
        batch.reward_baselines = row_baselines.nan_to_num()
        cost = {
            "baseline/response_tokens": float(length.sum()),
            "baseline/unscored_prompts": float(baselines.isnan().sum()),
        }
        scored = baselines[~baselines.isnan()]
        return cost | {"baseline/score_mean": float(scored.double().mean())} if len(scored) else cost


@dataclass(frozen=True)
class RewardComponents:
    """Reads the components from the dict that the reward returns."""

    keys: tuple[str, ...]
    """Keys of that dict; ``score`` is the score itself."""

    def add_to(self, batch: TrainBatch, outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
        """Set `reward_components`, 0 for rows without a score, and return metrics of their variation within groups.

        Raises:
            ValueError: a component of a scored response is missing, or is not a number in the range of float32.
        """
        batch.reward_components = torch.tensor([self._components(row, outcome) for row, outcome in enumerate(outcomes)])
        metrics: dict[str, float] = {}
        for key, values in zip(self.keys, batch.reward_components.unbind(dim=1), strict=True):
            groups = group_metrics(values, batch.uid, batch.scored)
            metrics |= {name.replace("group/", f"gdpo/{key}/"): value for name, value in groups.items()}
        return metrics

    def _components(self, row: int, outcome: RewardOutcome) -> list[float]:
        if not isinstance(outcome, Score):
            return [0.0] * len(self.keys)
        numbers = {"score": outcome.value, **outcome.extra}
        return [_number(numbers, key, row) for key in self.keys]


def _number(numbers: dict[str, object], key: str, row: int) -> float:
    value = numbers.get(key)
    if isinstance(value, int | float) and is_float32(value):
        return float(value)
    problem = (
        f"{value!r}, which is not a number in the range of float32"
        if key in numbers
        else f"nothing of that name, only {', '.join(numbers)}"
    )
    raise ValueError(
        f"algorithm.gdpo_reward_keys: for {key!r} the reward returned {problem} (response {row} of the step). Let it "
        "return each component with every score, as a number in its dict, or remove the name from the list."
    )


OWN_DEFAULT = ("raw",)
"""Estimators that use their own default for whitening instead of `algorithm.normalize_advantages`."""


def asks_for(algorithm: AlgorithmConfig, what: str) -> bool:
    """Whether the estimator of a run requires an input, for example ``reward_baselines``."""
    return what in needs(advantage_estimator(algorithm.adv_estimator))


def check_own_functions(algorithm: AlgorithmConfig, actor: ActorConfig, *, has_critic: bool) -> None:
    """Load the user's functions for this run, and call each once on a small batch.

    Raises:
        ValueError: a function fails, or an estimator needs a critic's values and the run has no critic.
    """
    policy_loss(actor.policy_loss.loss_mode)
    if asks_for(algorithm, "values") and not has_critic:
        what = f"algorithm.adv_estimator={algorithm.adv_estimator} needs values, and there is no critic"
        raise ValueError(f"{what}: set critic.enable=True")


def build_advantage_estimator(algorithm: AlgorithmConfig) -> Callable[[TrainBatch], dict[str, float]]:
    """Return the function that sets `advantages` and `returns` of a batch and returns metrics."""
    estimator = advantage_estimator(algorithm.adv_estimator)
    compares = "uid" in signature(estimator).parameters
    weights = torch.tensor(algorithm.gdpo_reward_weights) if algorithm.gdpo_reward_weights else None
    alpha = algorithm.lam_actor_alpha
    decoupled = alpha is not None or algorithm.lam_critic != algorithm.lam
    whitening = (
        {"normalize_advantages": algorithm.normalize_advantages} if algorithm.adv_estimator not in OWN_DEFAULT else {}
    )

    def estimate(batch: TrainBatch) -> Advantages:
        return estimator(
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

    def add_to(batch: TrainBatch) -> dict[str, float]:
        result = estimate_by_branch(estimate, batch) if compares and batch.episode is not None else estimate(batch)
        batch.advantages, batch.returns = result.advantages, result.returns
        return value_metrics(batch)

    return add_to


def build_reward_shaping(
    algorithm: AlgorithmConfig, reward: RewardModelConfig, max_length: int
) -> RewardShaping | None:
    """Return the shaping of rewards; None if nothing is configured."""
    penalty = _length_penalty(reward.overlong_buffer, max_length)
    how, scale = algorithm.normalize_rewards, reward.reward_scale
    if penalty is None and how == "none" and scale == 1:
        return None
    running = RunningRewardNormalizer() if how == "running" else None
    return RewardShaping(penalty, running, per_batch=how == "batch", scale=scale)


def build_greedy_baseline(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, reward: RewardModelConfig, max_length: int
) -> GreedyBaseline | None:
    """Return ReMax's baseline; None for other estimators."""
    if not asks_for(algorithm, "reward_baselines"):
        return None
    greedy = SamplingParams(
        max_new_tokens=rollout.response_length,
        max_length=rollout.max_model_len,
        temperature=0.0,
        ignore_eos=rollout.ignore_eos,
    )
    return GreedyBaseline(greedy, _length_penalty(reward.overlong_buffer, max_length), reward.reward_scale)


def build_reward_components(algorithm: AlgorithmConfig) -> RewardComponents | None:
    """Return GDPO's reward components; None for other estimators."""
    return RewardComponents(algorithm.gdpo_reward_keys) if asks_for(algorithm, "reward_components") else None


def _length_penalty(buffer: OverlongBufferConfig, max_length: int) -> LengthPenalty | None:
    if not buffer.enable:
        return None
    return partial(
        overlong_penalty, max_length=max_length, buffer_length=buffer.len, penalty_factor=buffer.penalty_factor
    )


def build_kl_reward(algorithm: AlgorithmConfig) -> KLReward | None:
    """Return the KL penalty in the reward; None if it is off."""
    if not algorithm.use_kl_in_reward:
        return None
    control = algorithm.kl_ctrl
    if control.type == "adaptive":
        return KLReward(AdaptiveKLController(control.kl_coef, control.target_kl, control.horizon), algorithm.kl_penalty)
    return KLReward(FixedKLController(control.kl_coef), algorithm.kl_penalty)


def value_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the explained variance of the critic; empty without a critic, or without a token to train on."""
    if batch.values is None or batch.returns is None or not batch.response_mask.any():
        return {}
    return {"critic/vf_explained_var": float(explained_variance(batch.values, batch.returns, batch.response_mask))}
