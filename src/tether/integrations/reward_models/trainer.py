"""The training batches of a reward model, which are pairs of token ids, and its accuracy on held-out pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from tether.batch import TrainBatch
from tether.runtime.terminal import Screen, Waiting
from tether.text.data.pairs import SIDES, Pair, pair_ids
from tether.text.data.rows import raise_problems
from tether.text.learning.pretraining import held_out_prompts
from tether.text.learning.scoring import PairOutputs, pair_batch, without_padding

ACCURACY = "rm/held_out_accuracy"
SKIPPED_STEPS = 10
"""Consecutive steps without an update after which training stops."""
_UNUSABLE = "the model is unusable: start again, and lower --lr or check that the files of --model are complete"


def split_pairs(pairs: Sequence[Pair], held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split pairs by prompt into training and held-out pairs, with at least one prompt on each side.

    Args:
        pairs: pairs of at least two prompts.
        held_out: share of the prompts that is held out.
        seed: seed of the random split.

    Raises:
        ValueError: all pairs have the same prompt.
    """
    selected = held_out_prompts((pair.prompt for pair in pairs), held_out, seed)
    learned = [pair for pair in pairs if pair.prompt not in selected]
    return learned, [pair for pair in pairs if pair.prompt in selected]


def preference_batch(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int | None,
    max_length: int,
    chat_template: str | None = None,
) -> TrainBatch:
    """Tokenize pairs to rows for `tether.text.learning.scoring.PairForward`, with a chat template or the tokenizer's
    default.

    Raises:
        ValueError: pairs are too long, have no tokens or have equal sides; the message names up to ten by file and row.
    """
    rows, margins, problems = [], [], []
    with Waiting("preparing pairs", len(pairs), Screen(stderr=True), late=True) as waiting:
        for pair in waiting.each(pairs):
            both = pair_ids(pair, tokenizer, chat_template)
            chosen, rejected = (without_padding(ids, pad_id) for ids in both)
            if empty := [name for name, ids in zip(SIDES, both, strict=True) if set(ids) <= {pad_id}]:
                problems.append(
                    f"{pair.place}: `{empty[0]}` has only padding tokens, so that there is nothing to score; remove it"
                )
            elif max(map(len, both)) > max_length:
                longest = max(map(len, both))
                problems.append(
                    f"{pair.place}: {longest} tokens are more than {max_length}; remove it, or raise --max-length "
                    "up to the maximum position of the model"
                )
            elif chosen == rejected:
                problems.append(f"{pair.place}: chosen and rejected are the same, so there is no preference; remove it")
            else:
                rows.append((chosen, rejected))
                margins.append(pair.margin)
    raise_problems(problems)
    return pair_batch(rows, margins)


def preference_accuracy(outputs: PairOutputs, batch: TrainBatch) -> dict[str, float]:
    """Return the metric of the share of pairs whose chosen side has the higher score.

    Raises:
        ValueError: a score is not finite, so the model is unusable.
    """
    if not (outputs.chosen.isfinite().all() and outputs.rejected.isfinite().all()):
        raise ValueError(f"the scores of held-out pairs are not finite, so {_UNUSABLE}")
    return {ACCURACY: float((outputs.chosen > outputs.rejected).double().mean())}


def beats_chance(accuracy: float, pairs: int) -> bool:
    """Return whether the accuracy on held-out pairs is above chance at the 5 % level."""
    return accuracy - 0.5 / pairs > 0.5 + 1.645 * math.sqrt(0.25 / pairs)  # 0.5 / pairs is the continuity correction


def until_unusable(steps: Iterable[tuple[int, dict[str, float]]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the steps, and stop a training that no longer makes updates.

    Raises:
        ValueError: `SKIPPED_STEPS` consecutive steps, or the majority of an epoch, had no finite gradient.
    """
    skips: list[bool] = []
    for step, metrics in steps:
        yield step, metrics
        skips += [metrics["rm/skipped_updates"] > 0] if "rm/skipped_updates" in metrics else []
        epoch, last = skips if ACCURACY in metrics else [], skips[-SKIPPED_STEPS:]
        checked = last if len(last) == SKIPPED_STEPS and all(last) else epoch
        if 2 * sum(checked) > len(checked):
            skipped = (
                f"{sum(checked)} of the last {len(checked)} updates were skipped, since their gradients were not finite"
            )
            raise ValueError(f"{skipped}: {_UNUSABLE}")
        if ACCURACY in metrics:
            skips = []
