"""The metrics of one training step, gathered from its batch."""

from __future__ import annotations

from tether.algorithms import Mean, explained_variance, masked_sum
from tether.batch import TrainBatch
from tether.metrics.data import data_metrics, group_metrics
from tether.metrics.estimators import estimator_metrics
from tether.metrics.perf import memory_metrics, throughput_metrics
from tether.metrics.timing import Timer, timing_per_token_ms
from tether.rewards import RewardReport
from tether.training.text import PolicyOutputs, sequence_lengths


def value_metrics(batch: TrainBatch) -> dict[str, float]:
    """How well the critic predicts the returns; nothing without a critic, or without a token to learn from."""
    if batch.values is None or batch.returns is None or not batch.response_mask.any():
        return {}
    return {"critic/vf_explained_var": float(explained_variance(batch.values, batch.returns, batch.response_mask))}


def step_metrics(
    batch: TrainBatch, policy: PolicyOutputs | None, report: RewardReport, time: Timer, max_prompt_length: int
) -> dict[str, float]:
    """What a finished step measured, beside the losses.

    Args:
        batch: with advantages.
        policy: log-probabilities and entropy at the start of the update; None where they were not computed.
        report: of the rewards.
        time: of the phases, with "step" the whole.
        max_prompt_length: the limit that prompts were held to.
    """
    tokens = int(sequence_lengths(batch).sum())
    entropy = {}
    if policy is not None and policy.entropy is not None:
        entropy["actor/entropy"] = float(Mean.of(policy.entropy, batch.response_mask))
    return {
        **data_metrics(batch, max_prompt_length=max_prompt_length),
        **estimator_metrics(batch),
        **group_metrics(masked_sum(batch.token_level_scores, batch.response_mask, dim=-1), batch.uid, batch.scored),
        **report.metrics,
        **entropy,
        **throughput_metrics(tokens, time.seconds["step"]),
        **memory_metrics(),
        **time.metrics(),
        **timing_per_token_ms(time.seconds, num_response_tokens=int(batch.response_length.sum()), num_tokens=tokens),
    }
