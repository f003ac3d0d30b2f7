"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476): a batch of prompts that all have something to teach.

Where all responses to a prompt score the same, a group baseline leaves no advantage. Such groups are dropped and
further prompts are sampled in their place, batch after batch, up to a cap::

    prompts ──► sample, score ──► groups with two different scores ──► enough? ──► the first ones are the batch
       ▲                                                                 │ no
       └──────────────── the next prompts of the data order ◄────────────┘

The prompts come from the run's own sampler, whose position is in the checkpoint, and noise is keyed by the number of
the sample within the step, which counts on over the batches: nothing else needs to be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tether.algorithms import informative_rows
from tether.batch import Prompt
from tether.data.prompts import PromptDataset
from tether.data.sampler import PromptSampler
from tether.rewards import RewardOutcome, RewardReport, Score
from tether.rollout import NoiseKey, SamplingParams, join_rollouts
from tether.trainer.parts.collector import Collector, ScoredResponses

OWN_SCORE = ("score", "seq_reward")
"""Names of the metric that mean the score itself."""


class NothingToLearn(Exception):
    """Every prompt that was sampled for a step had responses of one score only."""


@dataclass(frozen=True)
class Group:
    """The responses to one prompt of an experience."""

    experience: ScoredResponses
    prompt: int
    """Number of the prompt in it."""

    @property
    def rows(self) -> slice:
        """Its rows in the experience."""
        size = len(self.experience.texts) // len(self.experience.prompts)
        return slice(self.prompt * size, (self.prompt + 1) * size)


@dataclass(frozen=True)
class DynamicSampling:
    """Collects until there are enough informative groups."""

    collector: Collector
    dataset: PromptDataset
    sampler: PromptSampler
    """Deals the prompts of each further batch."""
    metric: str
    """Number that must differ within a group: ``score``, or a key that the reward returns with it."""
    num_groups: int
    """Groups of a full batch."""
    max_batches: int
    """Batches of prompts sampled for a step at most."""
    warn: Callable[[str], None]
    """Shows a message to the user."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        key: NoiseKey,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ScoredResponses:
        """As `Collector.collect`, of informative groups only, in the order in which they were sampled.

        What is sampled beyond a full batch is dropped: in the next step it would come from an older policy. If the cap
        is reached first, the batch holds the groups that were found; that is logged as a warning and as the metric
        ``dynamic_sampling/missing_groups``.

        Raises:
            NothingToLearn: the cap was reached without a single informative group.
            ValueError: the reward does not return `metric`.
        """
        sampled = [self.collector.collect(prompts, sampling, key, on_progress)]
        groups = self._informative(sampled[0])
        while len(groups) < self.num_groups and len(sampled) < self.max_batches:
            key = replace(key, first_sample=key.first_sample + len(sampled[-1].texts))
            prompts = [self.dataset[row] for row in self.sampler.next_batch()]
            sampled.append(self.collector.collect(prompts, sampling, key, on_progress))
            groups += self._informative(sampled[-1])
        self._check(len(groups), key.step)
        return _joined(sampled, groups, self.num_groups)

    def _informative(self, experience: ScoredResponses) -> list[Group]:
        scores, rollout = self._scores(experience), experience.rollout
        counted = rollout.response_mask & ~scores.isnan()[:, None]
        rows = informative_rows(scores.nan_to_num(), counted, rollout.uid)
        return [Group(experience, prompt) for prompt in rollout.uid[rows].unique().tolist()]

    def _scores(self, experience: ScoredResponses) -> Tensor:
        """[B] what must differ, NaN where the reward abstained or failed."""
        if self.metric in OWN_SCORE:
            return experience.scores
        return torch.tensor([self._extra(outcome) for outcome in experience.outcomes], dtype=torch.float32)

    def _extra(self, outcome: RewardOutcome) -> float:
        if not isinstance(outcome, Score):
            return float("nan")
        value = outcome.extra.get(self.metric)
        if not isinstance(value, int | float):
            known = ", ".join(["score", *outcome.extra])
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric}: the reward returns no such number, only {known}. "
                "Name one of these, or let the reward return it."
            )
        return float(value)

    def _check(self, found: int, step: int) -> None:
        if found >= self.num_groups:
            return
        cap = f"algorithm.filter_groups.max_num_gen_batches={self.max_batches}"
        if not found:
            raise NothingToLearn(
                f"step {step}: within {cap} no prompt had responses that differ in {self.metric}. The prompts are too "
                "easy or too hard for this policy, or the reward does not tell its answers apart: look at the samples, "
                "take other prompts, raise actor_rollout_ref.rollout.n, or set algorithm.filter_groups.enable=False."
            )
        self.warn(
            f"step {step}: within {cap} only {found} of {self.num_groups} prompts had responses that differ in "
            f"{self.metric}; the step takes these"
        )


def _joined(sampled: Sequence[ScoredResponses], groups: Sequence[Group], num_groups: int) -> ScoredResponses:
    """The first groups as one experience; the report counts all that was sampled, its scores are of these rows."""
    chosen = groups[:num_groups]
    rollouts = [group.experience.rollout[group.rows] for group in chosen]
    return ScoredResponses(
        prompts=[group.experience.prompts[group.prompt] for group in chosen],
        rollout=join_rollouts(rollouts, range(len(chosen))),
        texts=[text for group in chosen for text in group.experience.texts[group.rows]],
        outcomes=[outcome for group in chosen for outcome in group.experience.outcomes[group.rows]],
        report=RewardReport(
            scores=[score for group in chosen for score in group.experience.report.scores[group.rows]],
            num_scored=sum(experience.report.num_scored for experience in sampled),
            num_abstained=sum(experience.report.num_abstained for experience in sampled),
            num_failed=sum(experience.report.num_failed for experience in sampled),
            error_samples=tuple(sample for experience in sampled for sample in experience.report.error_samples),
            metrics=_mean_metrics(sampled) | _metrics(sampled, groups, num_groups),
        ),
        reward_seconds=sum(experience.reward_seconds for experience in sampled),
    )


def _mean_metrics(sampled: Sequence[ScoredResponses]) -> dict[str, float]:
    """Mean of each reward metric over the sampled batches that have it, weighted by their rows."""
    totals: dict[str, tuple[float, int]] = {}
    for experience in sampled:
        rows = len(experience.texts)
        for name, value in experience.report.metrics.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = (total + rows * value, count + rows)
    return {name: total / count for name, (total, count) in totals.items()}


def _metrics(sampled: Sequence[ScoredResponses], groups: Sequence[Group], num_groups: int) -> dict[str, float]:
    num_prompts = sum(len(experience.prompts) for experience in sampled)
    used = min(len(groups), num_groups)
    scores = torch.cat([experience.scores for experience in sampled])
    metrics = {
        "train/num_gen_batches": float(len(sampled)),
        "dynamic_sampling/wasted_fraction": 1 - used / num_prompts,
        "dynamic_sampling/uninformative_fraction": 1 - len(groups) / num_prompts,
        "dynamic_sampling/missing_groups": float(num_groups - used),
    }
    if not scores.isnan().all():
        metrics["dynamic_sampling/sampled_score_mean"] = float(scores.nanmean())
    return metrics
