"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476): batches of prompts whose responses differ in score.

If all responses to a prompt have the same score, a group baseline gives no advantage. Such groups are dropped and
replaced by further prompts, batch after batch, up to a limit::

    prompts ──► sample, score ──► groups with different scores ──► enough? ──► the first ones are the batch
       ▲                                                              │ no
       └──────────────── the next prompts of the data order ◄─────────┘

The prompts come from the run's sampler, whose position is in the checkpoint. Noise is keyed by the index of the sample
in the step, which continues over the batches, so no other state has to be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tether.algorithms import informative_rows
from tether.batch import Prompt
from tether.text.data.prompts import PromptDataset, PromptSampler
from tether.text.learning.collector import Collector, ScoredResponses
from tether.text.rewards.outcome import RewardOutcome, RewardReport, Score
from tether.text.sampling.concat import join_rollouts
from tether.text.sampling.protocol import NoiseKey, SamplingParams

SCORE_NAMES = ("score", "seq_reward")
"""Values of `metric` that stand for the score."""


class NothingToLearn(Exception):
    """Raised if no prompt of a step had responses with different scores."""


@dataclass(frozen=True)
class PromptGroup:
    """The responses to one prompt."""

    responses: ScoredResponses
    prompt: int
    """The index of the prompt in `responses`."""

    @property
    def rows(self) -> slice:
        """The rows of the group in `responses`."""
        size = len(self.responses.texts) // len(self.responses.prompts)
        return slice(self.prompt * size, (self.prompt + 1) * size)


@dataclass(frozen=True)
class DynamicSampling:
    """Samples batches until there are enough groups with different scores."""

    collector: Collector
    dataset: PromptDataset
    sampler: PromptSampler
    """Provides the prompts of further batches."""
    metric: str
    """The value that must differ within a group: ``score``, or a key that the reward returns with it."""
    num_groups: int
    """The number of groups of a full batch."""
    max_batches: int
    """The maximum number of batches of prompts that are sampled for a step."""
    warn: Callable[[str], None]
    """Shows a message to the user."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        key: NoiseKey,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ScoredResponses:
        """Sample and score like `Collector.collect`, but return only informative groups, in the order of sampling.

        If the limit is reached first, the batch has fewer groups, which is reported as a warning and as the metric
        ``dynamic_sampling/missing_groups``.

        Raises:
            NothingToLearn: the limit was reached without a single informative group.
            ValueError: the reward does not return `metric`.
        """
        # Groups beyond a full batch are dropped, because in the next step they would be from an older policy.
        sampled = [self.collector.collect(prompts, sampling, key, on_progress)]
        groups = self._informative(sampled[0])
        while len(groups) < self.num_groups and len(sampled) < self.max_batches:
            key = replace(key, first_sample=key.first_sample + len(sampled[-1].texts))
            prompts = [self.dataset[row] for row in self.sampler.next_batch()]
            sampled.append(self.collector.collect(prompts, sampling, key, on_progress))
            groups += self._informative(sampled[-1])
        self._check(len(groups), key.step)
        return _joined(sampled, groups, self.num_groups)

    def _informative(self, responses: ScoredResponses) -> list[PromptGroup]:
        scores, rollout = self._scores(responses), responses.rollout
        counted = rollout.response_mask & ~scores.isnan()[:, None]
        rows = informative_rows(scores.nan_to_num(), counted, rollout.uid)
        return [PromptGroup(responses, prompt) for prompt in rollout.uid[rows].unique().tolist()]

    def _scores(self, responses: ScoredResponses) -> Tensor:
        """Return the value of `metric` for each row [B], NaN if the reward abstained or failed."""
        if self.metric in SCORE_NAMES:
            return responses.scores
        return torch.tensor([self._extra(outcome) for outcome in responses.outcomes], dtype=torch.float32)

    def _extra(self, outcome: RewardOutcome) -> float:
        if not isinstance(outcome, Score):
            return float("nan")
        value = outcome.extra.get(self.metric)
        if not isinstance(value, int | float):
            names = ", ".join(["score", *outcome.extra])
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward returns no such number, only {names}. "
                "Use one of these, or let the reward return it."
            )
        return float(value)

    def _check(self, num_informative: int, step: int) -> None:
        if num_informative >= self.num_groups:
            return
        limit = f"algorithm.filter_groups.max_num_gen_batches={self.max_batches}"
        if not num_informative:
            raise NothingToLearn(
                f"step {step}: within {limit} no prompt had responses that differ in {self.metric}. The prompts are "
                "too easy or too hard for this policy, or the reward does not distinguish its answers: read the "
                "samples, use other prompts, raise actor_rollout_ref.rollout.n, or set "
                "algorithm.filter_groups.enable=False."
            )
        self.warn(
            f"step {step}: within {limit} only {num_informative} of {self.num_groups} prompts had responses that "
            f"differ in {self.metric}; the step uses these"
        )


def _joined(sampled: Sequence[ScoredResponses], groups: Sequence[PromptGroup], num_groups: int) -> ScoredResponses:
    """Join the first groups; the report covers all samples, but has the scores of these rows only."""
    selected = groups[:num_groups]
    rollouts = [group.responses.rollout[group.rows] for group in selected]
    rows = [(group.responses, row) for group in selected for row in range(group.rows.start, group.rows.stop)]
    return ScoredResponses(
        prompts=[group.responses.prompts[group.prompt] for group in selected],
        rollout=join_rollouts(rollouts, range(len(selected))),
        texts=[text for group in selected for text in group.responses.texts[group.rows]],
        outcomes=[outcome for group in selected for outcome in group.responses.outcomes[group.rows]],
        report=RewardReport(
            scores=[score for group in selected for score in group.responses.report.scores[group.rows]],
            num_scored=sum(responses.report.num_scored for responses in sampled),
            num_abstained=sum(responses.report.num_abstained for responses in sampled),
            num_failed=sum(responses.report.num_failed for responses in sampled),
            error_samples=tuple(sample for responses in sampled for sample in responses.report.error_samples),
            metrics=_mean_metrics(sampled) | _metrics(sampled, groups, num_groups),
        ),
        reward_seconds=sum(responses.reward_seconds for responses in sampled),
        call_seconds=[seconds for group in selected for seconds in group.responses.call_seconds[group.rows]],
        branches={at: one.branches[row] for at, (one, row) in enumerate(rows) if row in one.branches},
    )


def _mean_metrics(sampled: Sequence[ScoredResponses]) -> dict[str, float]:
    """Return the mean of each reward metric over the sampled batches that have it, weighted by their rows."""
    totals: dict[str, tuple[float, int]] = {}
    for responses in sampled:
        rows = len(responses.texts)
        for name, value in responses.report.metrics.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = (total + rows * value, count + rows)
    return {name: total / count for name, (total, count) in totals.items()}


def _metrics(sampled: Sequence[ScoredResponses], groups: Sequence[PromptGroup], num_groups: int) -> dict[str, float]:
    num_prompts = sum(len(responses.prompts) for responses in sampled)
    used = min(len(groups), num_groups)
    scores = torch.cat([responses.scores for responses in sampled])
    metrics = {
        "train/num_gen_batches": float(len(sampled)),
        "dynamic_sampling/wasted_fraction": 1 - used / num_prompts,
        "dynamic_sampling/uninformative_fraction": 1 - len(groups) / num_prompts,
        "dynamic_sampling/missing_groups": float(num_groups - used),
    }
    if not scores.isnan().all():
        metrics["dynamic_sampling/sampled_score_mean"] = float(scores.nanmean())
    return metrics
