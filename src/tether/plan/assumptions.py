"""Assumptions that a plan needs in addition to the configuration: response lengths, rows of the data, reward time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.config import RunConfig
from tether.plan.timing import Lengths


@dataclass(frozen=True)
class RowCount:
    """A number of rows, and its source."""

    count: int
    source: str


ROWS = {
    "gsm8k": RowCount(7473, "as GSM8K has"),
    "dapo": RowCount(17398, "as DAPO-Math-17k has"),
    "full_hh_rlhf": RowCount(112052, "as full-hh-rlhf has"),
    "eurus": RowCount(455261, "as Eurus-2 has"),
    "math": RowCount(7500, "as MATH has"),
}
"""Training rows of published data sets, by a word in their paths; the first match is used."""
HELD_OUT = {"gsm8k": RowCount(1319, "as GSM8K has"), "math": RowCount(5000, "as MATH has")}
"""Test rows of published data sets, by a word in their paths."""


@dataclass(frozen=True)
class Assumptions:
    """Values given on the command line; None: use a default."""

    prompt: float | None = None
    mean: float | None = None
    tail: float | None = None
    rows: int | None = None
    reward: float = 0.0
    """Seconds per step spent waiting for rewards."""


DEFAULT_ASSUMPTIONS = Assumptions()


def assumed_lengths(config: RunConfig, assumptions: Assumptions) -> Lengths:
    """Return the lengths of a run; by default means are half of the limits, and the tail is at the limit.

    For fine-tuning, the response of a conversation begins with its first learned token, by default its first token.

    Raises:
        ValueError: the lengths contradict each other or the configuration.
    """
    data, given = config.data, assumptions
    longest_prompt, limit = data.max_prompt_length, config.actor_rollout_ref.rollout.response_length
    prompt_key, bound = "data.max_prompt_length", f"data.max_response_length={limit}"
    prompt = longest_prompt / 2 if given.prompt is None else given.prompt
    if config.sft.enable:
        longest_prompt, prompt_key = data.max_length, "data.max_length"
        prompt = given.prompt or 0.0
        limit = max(1, data.max_length - int(prompt))
        bound = f"the {limit} tokens that data.max_length={data.max_length} leaves"
    mean = given.mean if given.mean is not None else min(given.tail or limit, limit) / 2
    tail = given.tail if given.tail is not None else float(limit)
    for option, value in (("--prompt-mean", given.prompt), ("--response-mean", mean), ("--response-tail", tail)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{option} {value:g}: is not a number of tokens above 0")
    if not math.isfinite(given.reward):
        raise ValueError(f"--reward-seconds {given.reward:g}: is not a number of seconds")
    if prompt > longest_prompt:
        raise ValueError(f"--prompt-mean {prompt:g}: is above {prompt_key}={longest_prompt}")
    if tail > limit:
        raise ValueError(f"--response-tail {tail:g}: is above {bound}")
    if mean > tail:
        which = bound if given.tail is None else f"--response-tail={tail:g}"
        raise ValueError(f"--response-mean {mean:g}: is above {which}")
    return Lengths(prompt, mean, tail, limit)


def training_row_count(config: RunConfig, assumptions: Assumptions) -> RowCount | None:
    """Return the number of training rows: as given, as counted in the files, or of a published data set; else None."""
    data = config.data
    rows = RowCount(assumptions.rows, "by --rows") if assumptions.rows is not None else _rows_of(data.train_files, ROWS)
    return _limited(rows, data.train_max_samples, "data.train_max_samples")


def validation_rows(config: RunConfig) -> RowCount | None:
    """Return the number of held-out rows: as counted in the files, or of a published data set; else None."""
    return _limited(_rows_of(config.data.val_files, HELD_OUT), config.data.val_max_samples, "data.val_max_samples")


def _limited(rows: RowCount | None, limit: int, key: str) -> RowCount | None:
    """Return the rows limited to `limit`, or the limit if they are unknown; a negative limit has no effect."""
    if limit < 0 or (rows is not None and rows.count <= limit):
        return rows
    return RowCount(limit, f"by {key}")


def _rows_of(files: Sequence[str], published: Mapping[str, RowCount]) -> RowCount | None:
    counts = [_rows(file, published) for file in files]
    known = [count for count in counts if count is not None]
    if not counts or len(known) < len(counts):
        return None
    return RowCount(sum(count.count for count in known), " and ".join(dict.fromkeys(count.source for count in known)))


def _rows(file: str, published: Mapping[str, RowCount]) -> RowCount | None:
    path = Path(file).expanduser()
    if path.is_file() and path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return RowCount(sum(1 for line in lines if line.strip()), f"counted in {path.name}")
    if path.is_file() and path.suffix == ".parquet":
        from pyarrow.parquet import read_metadata

        return RowCount(int(read_metadata(path).num_rows), f"counted in {path.name}")
    return next((rows for word, rows in published.items() if word in file.lower()), None)
