"""Rollouts of language models: sampling, scoring and evaluation of responses, and the metrics of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from tether.algorithms import Mean, masked_sum
from tether.batch import Prompt, TrainBatch, WeightUpdate
from tether.loop.protocol import EvaluationResult, Experience, Progress, Rollouts, Source
from tether.metrics.data import data_metrics, estimator_metrics, group_metrics
from tether.metrics.timing import Timer, memory_metrics, throughput_metrics, timing_per_token_ms
from tether.text.data.prompts import PromptDataset, PromptSampler
from tether.text.learning.advantages import GreedyBaseline, RewardComponents
from tether.text.learning.branches import with_branches
from tether.text.learning.collector import Collector, ScoredResponses
from tether.text.learning.dynamic_sampling import DynamicSampling
from tether.text.learning.evaluation import Evaluation
from tether.text.learning.losses import PolicyOutputs
from tether.text.learning.packing import sequence_lengths
from tether.text.learning.rollout_files import RolloutFiles
from tether.text.rewards.outcome import RewardReport
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.types import StateDict


def partial_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the share of rows in which weights changed; empty if none changed while the batch was sampled."""
    if batch.token_versions is None or batch.policy_version is None:
        return {}
    newest = batch.token_versions.masked_fill(~batch.response_mask, -1).amax(dim=-1)
    return {"training/partial_rows": float((newest > batch.policy_version).float().mean())}


def step_metrics(
    batch: TrainBatch, policy: PolicyOutputs | None, report: RewardReport, time: Timer, max_prompt_length: int
) -> dict[str, float]:
    """Return the metrics of a finished step, without the losses.

    Args:
        batch: the batch with advantages.
        policy: log-probs and entropy at the start of the update; None if they were not computed.
        report: the report on rewards.
        time: seconds of the phases; "step" is the total.
        max_prompt_length: the length limit of prompts.
    """
    tokens, episodes = int(sequence_lengths(batch).sum()), batch.episodes()
    scores = masked_sum(episodes.token_level_scores, episodes.response_mask, dim=-1)
    entropy = {}
    if policy is not None and policy.entropy is not None:
        entropy["actor/entropy"] = float(Mean.of(policy.entropy, batch.response_mask))
    return {
        **data_metrics(episodes, max_prompt_length=max_prompt_length),
        **estimator_metrics(episodes),
        **partial_metrics(batch),
        **group_metrics(scores, episodes.uid, episodes.scored),
        **report.metrics,
        **entropy,
        **throughput_metrics(tokens, time.seconds["step"]),
        **memory_metrics(),
        **time.metrics(),
        **timing_per_token_ms(time.seconds, num_response_tokens=int(batch.response_length.sum()), num_tokens=tokens),
    }


TextExperience = Experience[TrainBatch, ScoredResponses]


class RowDataset(Protocol):
    """The rows of a run, of any type."""

    def __getitem__(self, position: int, /) -> Any: ...


AnyDataset = TypeVar("AnyDataset", bound=RowDataset)


@dataclass(frozen=True)
class DatasetSource(Source[list[Any]], Generic[AnyDataset]):
    """Provides rows in the order of the sampler."""

    dataset: AnyDataset
    sampler: PromptSampler

    def next(self, step: int) -> list[Any]:
        return [self.dataset[row] for row in self.sampler.next_batch()]

    def metrics(self) -> dict[str, float]:
        return {"training/epoch": float(self.sampler.epoch)}

    def state_dict(self) -> StateDict:
        return self.sampler.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self.sampler.load_state_dict(state)


PromptSource = DatasetSource[PromptDataset]


@dataclass(frozen=True, kw_only=True)
class TextRollouts(Rollouts[Sequence[Prompt], TrainBatch, ScoredResponses]):
    """Samples and scores responses; optional components may be None."""

    collector: Collector
    sampling: SamplingParams
    dynamic_sampling: DynamicSampling | None
    greedy_baseline: GreedyBaseline | None
    reward_components: RewardComponents | None
    rollout_files: RolloutFiles | None
    evaluation: Evaluation | None
    teacher_of_source: Mapping[str, int]
    """Index of the teacher of each data source; empty if all rows have the same teacher, or none."""
    max_prompt_length: int
    """The length limit of prompts, for metrics."""
    seed: int
    transfers: Callable[[], dict[str, float]] = dict
    """Returns bytes and seconds of transfers to other processes since the last call."""
    weight_transfers: Callable[[], dict[str, float]] = dict
    """Returns the bytes of weights sent to servers, and failed transfers, since the last call; includes transfers
    between steps and during sampling."""
    check_parity: Callable[[], None] | None = None
    """Compares sampler and trainer before the first step; None if a step does this while it samples."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the policy."""
        return self.collector.tokenizer

    @property
    def can_evaluate(self) -> bool:
        return self.evaluation is not None

    def begin(self, step: int) -> None:
        """Compare sampler and trainer, if `check_parity` is set.

        Raises:
            ValueError: sampler and trainer disagree.
        """
        if self.check_parity:
            self.check_parity()

    def collect(self, prompts: Sequence[Prompt], step: int, time: Timer, progress: Progress) -> TextExperience:
        """Sample and score responses; row p * n + r of the batch is response r to prompt p, and further branches of
        episodes follow.

        Raises:
            RewardFailure: more reward calls failed than are allowed.
            NothingToLearn: dynamic sampling got no informative group.
        """
        key = NoiseKey(self.seed, step)
        self.transfers()  # discards transfers made before the step
        with time("gen"):
            scored = (self.dynamic_sampling or self.collector).collect(prompts, self.sampling, key, progress)
        time.move(scored.reward_seconds, "gen", "reward")
        batch = TrainBatch.assemble(scored.rollout, scored.scores)
        metrics: dict[str, float] = {}
        if self.greedy_baseline:
            with time("gen_max"):
                metrics |= self.greedy_baseline.add_to(batch, scored.prompts, self.collector, key)
        if self.reward_components:
            metrics |= self.reward_components.add_to(batch, scored.outcomes)
        if self.teacher_of_source:
            sources = [scored.prompt_of(row).data_source for row in range(len(batch))]
            batch.teacher = torch.tensor([self.teacher_of_source[source] for source in sources])
        if scored.branches:
            batch = with_branches(batch, scored)
        return Experience(batch, scored, metrics)

    def record(self, step: int, experience: TextExperience, time: Timer) -> None:
        """Write the samples to a file, if `rollout_files` is set.

        Raises:
            LogFailed: the file cannot be written.
        """
        if self.rollout_files:
            with time("dump_rollout_generations"):
                self.rollout_files.write(step, experience.details, experience.batch)

    def metrics(self, experience: TextExperience, outputs: PolicyOutputs | None, time: Timer) -> dict[str, float]:
        metrics = step_metrics(experience.batch, outputs, experience.details.report, time, self.max_prompt_length)
        return metrics | self.transfers() | self.weight_transfers()

    def load_weights(self, weights: WeightUpdate) -> None:
        self.collector.engine.load_weights(weights)

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        assert self.evaluation
        return self.evaluation.run(self.collector, NoiseKey(self.seed, step), progress)
