"""Sample responses and score them, the one while the other still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether.batch import Prompt, RolloutBatch
from tether.rewards import RewardOutcome, RewardPool, RewardReport, RewardRequest
from tether.rollout.protocol import FinishedResponse, NoiseKey, RolloutEngine, SamplingParams


@dataclass(frozen=True)
class Experience:
    """Sampled and scored responses; row p * n + r is response r of prompt p."""

    prompts: Sequence[Prompt]
    rollout: RolloutBatch
    texts: list[str]
    """The responses as the reward read them: without special tokens."""
    outcomes: list[RewardOutcome]
    report: RewardReport

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
    rewards: RewardPool
    tokenizer: PreTrainedTokenizerBase

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        key: NoiseKey,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Experience:
        """Sample `sampling.n` responses to each prompt; each is scored as soon as it ends.

        Args:
            prompts: at least one.
            sampling: how responses are drawn.
            key: names the random draws.
            on_progress: called with (finished responses, all responses).
        """
        total = len(prompts) * sampling.n
        texts = [""] * total
        finished = 0

        def submit(response: FinishedResponse) -> None:
            nonlocal finished
            finished += 1
            text = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
            prompt = prompts[response.row // sampling.n]
            texts[response.row] = text
            self.rewards.submit(
                response.row, RewardRequest(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
            )
            if on_progress:
                on_progress(finished, total)

        rollout = self.engine.generate([p.token_ids for p in prompts], sampling, key, on_finished=submit)
        outcomes = self.rewards.collect()
        return Experience(prompts, rollout, texts, outcomes, RewardReport.of(outcomes))
