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
from tether.rewards import Dialogue, RewardOutcome, RewardReport, RewardRequest, check_error_rate, summarize
from tether.rewards.service import Rewards
from tether.rollout import FinishedResponse, NoiseKey, RolloutEngine, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ScoredResponses:
    """Sampled responses and their rewards; row p * n + r is response r of prompt p."""

    prompts: Sequence[Prompt]
    rollout: RolloutBatch
    texts: list[str]
    """The responses as the reward read them: without special tokens."""
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

        def submit(response: FinishedResponse) -> None:
            text = decode(self.tokenizer, response.token_ids, skip_special_tokens=True)
            prompt = prompts[response.row // sampling.n]
            dialogue = Dialogue(prompt.messages, prompt.token_ids, response.token_ids)
            request = RewardRequest(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, dialogue)
            requests[response.row] = request
            self.rewards.submit(response.row, request)
            if on_progress:
                on_progress(len(requests), total)

        rollout = self.engine.generate([p.token_ids for p in prompts], sampling, key, on_finished=submit)
        begun = time.perf_counter()
        outcomes = self.rewards.collect()
        waited = time.perf_counter() - begun
        ordered = [requests[row] for row in range(total)]
        report = summarize(ordered, outcomes, self.rewards.durations)
        check_error_rate(report, self.max_error_rate)
        return ScoredResponses(prompts, rollout, [r.solution_str for r in ordered], outcomes, report, waited)
