"""Training data of a reward model, pairs of token ids; and the share of held-out pairs that it ranks right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from tether.batch import TrainBatch
from tether.data.pairs import SIDES, Pair, pair_ids
from tether.data.rows import raise_problems
from tether.runtime.terminal import Screen, Waiting
from tether.trainer.text.pretraining import held_out_prompts
from tether.training.text import PairOutputs, pair_batch, without_padding

ACCURACY = "rm/held_out_accuracy"
SKIPPED_STEPS = 10
"""Steps in a row without an update that end a training."""
_LOST = "the model is of no use: begin again, and lower --lr or see whether --model is whole"


def split_pairs(pairs: Sequence[Pair], held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Part the prompts, at least one on each side: all pairs of a prompt are learned from, or none is.

    Args:
        pairs: of at least two prompts.
        held_out: share of the prompts that is kept apart.
        seed: of the pick.

    Raises:
        ValueError: all pairs are of the same prompt.
    """
    chosen = held_out_prompts((pair.prompt for pair in pairs), held_out, seed)
    learned = [pair for pair in pairs if pair.prompt not in chosen]
    return learned, [pair for pair in pairs if pair.prompt in chosen]


def preference_batch(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int | None,
    max_length: int,
    chat_template: str | None = None,
) -> TrainBatch:
    """Tokenize pairs, as rows for `tether.training.text.PairForward`, with a chat template or the tokenizer's own.

    Raises:
        ValueError: pairs that are too long, without tokens, or the same in tokens; up to ten of them, by file and row.
    """
    rows, margins, problems = [], [], []
    with Waiting("preparing pairs", len(pairs), Screen(stderr=True), late=True) as waiting:
        for pair in waiting.each(pairs):
            both = pair_ids(pair, tokenizer, chat_template)
            chosen, rejected = (without_padding(ids, pad_id) for ids in both)
            if empty := [name for name, ids in zip(SIDES, both, strict=True) if set(ids) <= {pad_id}]:
                problems.append(
                    f"{pair.place}: `{empty[0]}` has no token but padding, so nothing is scored; leave it out"
                )
            elif max(map(len, both)) > max_length:
                longest = max(map(len, both))
                problems.append(
                    f"{pair.place}: {longest} tokens are more than {max_length}; leave it out, or raise --max-length "
                    "as far as the model's positions reach"
                )
            elif chosen == rejected:
                problems.append(
                    f"{pair.place}: chosen and rejected are the same, so nothing is preferred; leave it out"
                )
            else:
                rows.append((chosen, rejected))
                margins.append(pair.margin)
    raise_problems(problems)
    return pair_batch(rows, margins)


def preference_accuracy(outputs: PairOutputs, batch: TrainBatch) -> dict[str, float]:
    """Share of the pairs whose chosen side has the higher score.

    Raises:
        ValueError: a score is not finite, so nothing can be made of the model.
    """
    if not (outputs.chosen.isfinite().all() and outputs.rejected.isfinite().all()):
        raise ValueError(f"the scores of held-out pairs are not finite, so {_LOST}")
    return {ACCURACY: float((outputs.chosen > outputs.rejected).double().mean())}


def beats_chance(accuracy: float, pairs: int) -> bool:
    """Whether coins would rank as many of the held-out pairs right once in 20 times at most."""
    return accuracy - 0.5 / pairs > 0.5 + 1.645 * math.sqrt(0.25 / pairs)  # 0.5 / pairs: counts go in steps


def until_lost(steps: Iterable[tuple[int, dict[str, float]]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Pass steps on, and end a training that makes no updates any more.

    Raises:
        ValueError: `SKIPPED_STEPS` in a row had no finite gradient, or most of an epoch.
    """
    skips: list[bool] = []
    for step, metrics in steps:
        yield step, metrics
        skips += [metrics["rm/skipped_updates"] > 0] if "rm/skipped_updates" in metrics else []
        ended, row = skips if ACCURACY in metrics else [], skips[-SKIPPED_STEPS:]
        lost = row if len(row) == SKIPPED_STEPS and all(row) else ended
        if 2 * sum(lost) > len(lost):
            skipped = f"{sum(lost)} of the last {len(lost)} updates were skipped, since their gradients were not finite"
            raise ValueError(f"{skipped}: {_LOST}")
        if ACCURACY in metrics:
            skips = []
