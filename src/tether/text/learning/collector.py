"""Samples responses and scores each as soon as it ends, while others are still being sampled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tether.batch import Prompt, RolloutBatch
from tether.text.data.prompts import decode
from tether.text.rewards.outcome import (
    Dialogue,
    RewardOutcome,
    RewardReport,
    RewardRequest,
    Score,
    check_error_rate,
    summarize,
)
from tether.text.rewards.service import Rewards
from tether.text.sampling.protocol import FinishedResponse, NoiseKey, RolloutEngine, RolloutProgress, SamplingParams
from tether.text.turns.conversations import ConversationBatch, Conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ScoredResponses:
    """Sampled responses and their rewards; row p * n + r is response r of prompt p."""

    prompts: Sequence[Prompt]
    rollout: RolloutBatch
    texts: list[str]
    """The responses without special tokens."""
    outcomes: list[RewardOutcome]
    report: RewardReport
    reward_seconds: float
    """Time spent waiting for rewards after the last response was complete."""
    call_seconds: Sequence[float] = ()
    """Duration of the reward call of each row, NaN for rows without a call; empty if unknown."""
    branches: Mapping[int, RolloutBatch] = field(default_factory=dict)
    """Row -> further branches of its episode; `tether.text.learning.branches` adds them to a batch."""

    @property
    def scores(self) -> Tensor:
        """The score of each row [B], NaN if the reward abstained or failed."""
        return torch.tensor(self.report.scores, dtype=torch.float32)

    def prompt_of(self, row: int) -> Prompt:
        """Return the prompt that a row answers."""
        return self.prompts[row * len(self.prompts) // len(self.texts)]


@dataclass(frozen=True)
class Collector:
    """Samples and scores responses to prompts."""

    engine: RolloutEngine
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    max_error_rate: float
    """Share of reward calls that may fail before the run stops."""
    conversations: Conversations | None = None
    """Provides replies between the turns of the policy; None if a response is a single turn."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        key: NoiseKey,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ScoredResponses:
        """Sample `sampling.n` responses to each prompt, and score each as soon as it ends.

        Args:
            prompts: the prompts, at least one.
            sampling: sampling parameters.
            key: key of the noise.
            on_progress: called with (responses, all responses). An unfinished response counts as its share of the
                maximum length, because concurrent responses end at about the same time and a count of finished ones
                would say little.

        Raises:
            RewardFailure: more calls failed than `max_error_rate` allows.
        """
        total = len(prompts) * sampling.n
        requests: dict[int, RewardRequest] = {}
        texts: dict[int, str] = {}
        finished_tokens = shown = 0
        episodes = self.conversations.begin(prompts, sampling.n) if self.conversations else None

        def show(done: float) -> None:
            nonlocal shown
            shown = max(shown, min(int(done), total))  # an unfinished response may end early or late: never count down
            if on_progress:
                on_progress(shown, total)

        def tell(progress: RolloutProgress) -> None:
            unfinished_tokens = max(progress.tokens - finished_tokens, 0)
            show(progress.finished + unfinished_tokens / sampling.max_new_tokens)

        def submit(response: FinishedResponse) -> None:
            nonlocal finished_tokens
            finished_tokens += len(response.token_ids)
            row, prompt = response.row, prompts[response.row // sampling.n]
            texts[row] = decode(self.tokenizer, response.token_ids, skip_special_tokens=True)
            dialogue = Dialogue(prompt.messages, prompt.token_ids, response.token_ids)
            solution, extra = texts[row], prompt.extra_info
            if episodes:
                solution, extra = episodes.solution(row, response.token_ids), episodes.extra_info(row)
            requests[row] = RewardRequest(prompt.data_source, solution, prompt.ground_truth, extra, dialogue)
            if episodes is None or episodes.needs_reward(row):
                self.rewards.submit(row, requests[row])
            show(len(requests))

        ids = [prompt.token_ids for prompt in prompts]
        rollout = self.engine.generate(ids, sampling, key, on_finished=submit, on_progress=tell, responder=episodes)
        start = time.perf_counter()
        outcomes = self.rewards.collect()
        waited = time.perf_counter() - start
        called = [row for row in range(total) if episodes is None or episodes.needs_reward(row)]
        seconds = seconds_by_row(total, called, self.rewards.durations)
        if episodes:
            outcomes = _with_turns(episodes, rollout, outcomes)
        ordered = [requests[row] for row in range(total)]
        report = summarize(ordered, outcomes, self.rewards.durations or [0.0])
        check_error_rate(report, self.max_error_rate)
        ordered_texts = [texts[row] for row in range(total)]
        return ScoredResponses(prompts, rollout, ordered_texts, outcomes, report, waited, seconds)


def seconds_by_row(total: int, called: Sequence[int], durations: Sequence[float]) -> list[float]:
    """Return the seconds of the reward call for each of `total` rows, NaN for rows that are not in `called`."""
    seconds = [math.nan] * total
    for row, duration in zip(called, durations, strict=True):
        seconds[row] = duration
    return seconds


def _with_turns(
    episodes: ConversationBatch, rollout: RolloutBatch, outcomes: Sequence[RewardOutcome]
) -> list[RewardOutcome]:
    """Return the outcome of every row, in which the rewards of its turns are added to the final reward.

    Args:
        episodes: the conversations.
        rollout: the rows.
        outcomes: outcomes of the rows that `needs_reward`, in order.
    """
    remaining = iter(outcomes)
    final = [next(remaining) if episodes.needs_reward(row) else episodes.outcome(row) for row in range(len(rollout))]
    episodes.complete(rollout, [outcome.value if isinstance(outcome, Score) else 0.0 for outcome in final])
    return [
        Score(outcome.value + episodes.reward(row), outcome.extra | episodes.counts(row))
        if isinstance(outcome, Score)
        else outcome
        for row, outcome in enumerate(final)
    ]
