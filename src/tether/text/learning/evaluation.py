"""Validation of the current policy: samples and scores responses to every held-out prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tether.batch import Prompt
from tether.loop.protocol import EvaluationResult
from tether.metrics.loggers import Sample
from tether.metrics.validation import ValidationRow, validation_metrics
from tether.text.data.prompts import PromptDataset, decode
from tether.text.learning.collector import Collector, ScoredResponses
from tether.text.rewards.outcome import RewardError, Score
from tether.text.sampling.protocol import NoiseKey, SamplingParams

VALIDATION_SEED = 0x5EED
"""Distinguishes the noise of sampled validation from that of training."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluates a policy on held-out prompts."""

    dataset: PromptDataset
    sampling: SamplingParams
    batch_size: int | None = None
    """Number of prompts that are sampled together; None: all at once."""

    def run(
        self, collector: Collector, key: NoiseKey, on_progress: Callable[[int, int], None] | None = None
    ) -> EvaluationResult:
        """Sample and score responses to all prompts.

        Args:
            collector: samples and scores.
            key: noise key of the training step, from which the key of validation is derived.
            on_progress: called with (responses, all responses), as `Collector.collect` does.
        """
        total = len(self.dataset) * self.sampling.n
        samples: list[Sample] = []
        rows: list[ValidationRow] = []
        for prompts in self._batches():
            first = len(samples)
            batch_key = replace(key, seed=key.seed ^ VALIDATION_SEED, first_sample=first)

            def show(done: int, _: int, first: int = first) -> None:
                if on_progress:
                    on_progress(first + done, total)

            responses = collector.collect(prompts, self.sampling, batch_key, show)
            samples += list(samples_of(responses, collector))
            rows += list(_validation_rows(responses))
        return EvaluationResult(validation_metrics(rows), samples)

    def _batches(self) -> Iterator[Sequence[Prompt]]:
        size = self.batch_size or len(self.dataset)
        for start in range(0, len(self.dataset), size):
            yield [self.dataset[row] for row in range(start, min(start + size, len(self.dataset)))]


def samples_of(responses: ScoredResponses, collector: Collector) -> Iterator[Sample]:
    """Yield a sample for the logs for each response."""
    for row, (text, outcome) in enumerate(zip(responses.texts, responses.outcomes, strict=True)):
        prompt = responses.prompt_of(row)
        yield Sample(
            index=prompt.index,
            data_source=prompt.data_source,
            prompt=decode(collector.tokenizer, prompt.token_ids),
            response=text,
            reward=outcome.value if isinstance(outcome, Score) else None,
            ground_truth=prompt.ground_truth,
            note=outcome.message if isinstance(outcome, RewardError) else "",
            truncated=bool(responses.rollout.truncated[row]),
            extra=outcome.extra if isinstance(outcome, Score) else {},
        )


def _validation_rows(responses: ScoredResponses) -> Iterator[ValidationRow]:
    for row, outcome in enumerate(responses.outcomes):
        prompt = responses.prompt_of(row)
        score = outcome if isinstance(outcome, Score) else None
        extra = dict(score.extra) if score else {}
        prediction = extra.pop("pred", None)
        values = {"reward": score.value if score else None, **extra}
        answer = prompt.ground_truth  # of any type; the truth value of an array is undefined
        truth = None if answer is None or (isinstance(answer, str) and not answer) else repr(answer)
        yield ValidationRow(prompt.data_source, prompt.index, values, prediction, prompt.token_ids.tobytes(), truth)
