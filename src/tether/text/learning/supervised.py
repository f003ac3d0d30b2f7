"""Supervised fine-tuning in the training loop: conversations replace rollouts, and the loss replaces validation
scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from rich.console import RenderableType
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from tether.batch import TrainBatch, WeightUpdate
from tether.loop.engine import Learner, LossSizes
from tether.loop.preflight import Finding
from tether.loop.protocol import EvaluationResult, Experience, Progress, Rollouts
from tether.metrics.timing import Timer, memory_metrics, throughput_metrics
from tether.text.data.examples import Example, ExampleDataset
from tether.text.data.prompts import decode
from tether.text.learning.losses import PolicyOutputs
from tether.text.learning.packing import sequence_lengths
from tether.text.learning.scoring import marked_rows

SHOWN_CHARACTERS = 2000


def example_batch(examples: Sequence[Example]) -> TrainBatch:
    """Return a batch with a row for each example, whose response begins with the first token to train on."""
    starts = [int(example.mask.argmax()) for example in examples]
    pairs = list(zip(examples, starts, strict=True))
    return marked_rows(
        list(range(len(examples))),
        [example.token_ids[:start].tolist() for example, start in pairs],
        [example.token_ids[start:].tolist() for example, start in pairs],
        [example.mask[start:].nonzero()[0].tolist() for example, start in pairs],
    )


@dataclass(frozen=True)
class SupervisedRollouts(Rollouts[Sequence[Example], TrainBatch, None]):
    """Makes batches of examples and measures the loss of held-out ones."""

    learner: Learner[TrainBatch, PolicyOutputs]
    held_out: ExampleDataset | None
    batch_size: int | None
    """Number of held-out examples per forward pass over all micro-batches; None: all."""

    @property
    def can_evaluate(self) -> bool:
        return self.held_out is not None

    def collect(
        self, examples: Sequence[Example], step: int, time: Timer, progress: Progress
    ) -> Experience[TrainBatch, None]:
        return Experience(example_batch(examples), None)

    def metrics(self, experience: Experience[TrainBatch, None], outputs: object, time: Timer) -> dict[str, float]:
        return {
            "train/learned_tokens": float(experience.batch.response_mask.sum()),
            **throughput_metrics(int(sequence_lengths(experience.batch).sum()), time.seconds["step"]),
            **memory_metrics(),
            **time.metrics(),
        }

    def load_weights(self, weights: WeightUpdate) -> None:
        pass

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        """Return the loss of the held-out examples, aggregated over all of them as in a mini-batch."""
        assert self.held_out is not None
        examples = list(self.held_out)
        size, loss = self.batch_size or len(examples), torch.zeros((), dtype=torch.float64)
        sizes = LossSizes(sum(int(example.mask.sum()) for example in examples), len(examples))
        for start in range(0, len(examples), size):
            batch = example_batch(examples[start : start + size])
            loss += self.learner.loss.function(self.learner.infer(batch), batch, sizes).loss
            progress(min(start + size, len(examples)), len(examples))
        return EvaluationResult({"val/loss": float(loss)})


@dataclass(frozen=True)
class ExampleSample:
    """The first example, with the tokens that are trained on, as a `tether.loop.preflight.PreflightSample`."""

    example: Example
    tokenizer: PreTrainedTokenizerBase
    findings: Sequence[Finding] = ()
    step_rows: None = None

    def render(self) -> list[RenderableType]:
        text, index = Text(), 0
        for is_learned, group in groupby(self.example.mask.tolist()):
            end = index + len(list(group))
            style = "bold green" if is_learned else "dim"
            text.append(decode(self.tokenizer, self.example.token_ids[index:end]), style)
            index = end
        text.truncate(SHOWN_CHARACTERS, overflow="ellipsis")
        title = f"{self.example.place}, {len(self.example.mask)} tokens, of which the green ones are learned"
        return [Text(title, style="bold"), text]
