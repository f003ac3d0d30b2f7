"""Sample responses and score them, the one while the other still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tether.batch import Prompt, RolloutBatch
from tether.data.chat import decode
from tether.rewards import (
    Dialogue,
    RewardOutcome,
    RewardReport,
    RewardRequest,
    Score,
    check_error_rate,
    summarize,
)
from tether.rewards.service import Rewards
from tether.rollout import FinishedResponse, NoiseKey, RolloutEngine, SamplingParams
from tether.rollout.turns import ConversationBatch, Conversations

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
    """Waited for rewards after the last response was complete."""

    @property
    def scores(self) -> Tensor:
        """[B] score a row, NaN where the reward abstained or failed."""
        return torch.tensor(self.report.scores, dtype=torch.float32)

    def prompt_of(self, row: int) -> Prompt:
        """The prompt that a row answers."""
        return self.prompts[row * len(self.prompts) // len(self.texts)]


@dataclass(frozen=True)
class Collector:
    """Prompts in, experience out."""

    engine: RolloutEngine
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    max_error_rate: float
    """Share of failing reward calls above which the run stops."""
    conversations: Conversations | None = None
    """Who answers the policy between its turns; None: it has one."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        key: NoiseKey,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ScoredResponses:
        """Sample `sampling.n` responses to each prompt; each is scored as soon as it ends.

        Args:
            prompts: at least one.
            sampling: how responses are drawn.
            key: names the random draws.
            on_progress: called with (finished responses, all responses).

        Raises:
            RewardFailure: more calls failed than `max_error_rate` allows.
        """
        total = len(prompts) * sampling.n
        requests: dict[int, RewardRequest] = {}
        texts: dict[int, str] = {}
        talk = self.conversations.begin(prompts, sampling.n) if self.conversations else None

        def submit(response: FinishedResponse) -> None:
            row, prompt = response.row, prompts[response.row // sampling.n]
            texts[row] = decode(self.tokenizer, response.token_ids, skip_special_tokens=True)
            dialogue = Dialogue(prompt.messages, prompt.token_ids, response.token_ids)
            said, extra = texts[row], prompt.extra_info
            if talk:
                said, extra = talk.solution(row, response.token_ids), talk.extra_info(row)
            requests[row] = RewardRequest(prompt.data_source, said, prompt.ground_truth, extra, dialogue)
            if talk is None or talk.needs_reward(row):
                self.rewards.submit(row, requests[row])
            if on_progress:
                on_progress(len(requests), total)

        ids = [prompt.token_ids for prompt in prompts]
        rollout = self.engine.generate(ids, sampling, key, on_finished=submit, responder=talk)
        begun = time.perf_counter()
        outcomes = self.rewards.collect()
        waited = time.perf_counter() - begun
        if talk:
            outcomes = _with_turns(talk, rollout, outcomes)
        ordered = [requests[row] for row in range(total)]
        report = summarize(ordered, outcomes, self.rewards.durations or [0.0])
        check_error_rate(report, self.max_error_rate)
        return ScoredResponses(prompts, rollout, [texts[row] for row in range(total)], outcomes, report, waited)


def _with_turns(talk: ConversationBatch, rollout: RolloutBatch, asked: Sequence[RewardOutcome]) -> list[RewardOutcome]:
    """Outcome of every row: its reward at the end, of those that were asked for, and the rewards of its turns."""
    rest = iter(asked)
    at_end = [next(rest) if talk.needs_reward(row) else talk.outcome(row) for row in range(len(rollout))]
    talk.complete(rollout, [outcome.value if isinstance(outcome, Score) else 0.0 for outcome in at_end])
    return [
        Score(outcome.value + talk.reward(row), outcome.extra | talk.counts(row))
        if isinstance(outcome, Score)
        else outcome
        for row, outcome in enumerate(at_end)
    ]
