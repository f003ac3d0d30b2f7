"""What a configuration does not say and a plan needs: lengths of responses, rows of the data, seconds of the reward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tether.config import RunConfig
from tether.plan.timing import Lengths


@dataclass(frozen=True)
class RowCount:
    """A number of rows, and where it is from."""

    count: int
    source: str


ROWS = {
    "gsm8k": RowCount(7473, "as GSM8K has"),
    "dapo": RowCount(17398, "as DAPO-Math-17k has"),
    "full_hh_rlhf": RowCount(112052, "as full-hh-rlhf has"),
    "eurus": RowCount(455261, "as Eurus-2 has"),
    "math": RowCount(7500, "as MATH has"),
}
"""Training rows of published data sets, by a word in their paths; the first one counts."""


@dataclass(frozen=True)
class Assumptions:
    """What was given on the command line; None: a default."""

    prompt: float | None = None
    mean: float | None = None
    tail: float | None = None
    rows: int | None = None
    reward: float = 0.0
    """Seconds of waiting for rewards in a step."""


NOTHING_GIVEN = Assumptions()


def lengths_of(config: RunConfig, assumptions: Assumptions) -> Lengths:
    """Return the lengths of a run; unless given, half of the limits on average, and a tail at the limit.

    Raises:
        ValueError: the lengths contradict each other or the configuration.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    limit = rollout.response_length
    prompt = assumptions.prompt if assumptions.prompt is not None else data.max_prompt_length / 2
    mean = assumptions.mean if assumptions.mean is not None else min(assumptions.tail or limit, limit) / 2
    tail = assumptions.tail if assumptions.tail is not None else float(limit)
    for option, value in (("--prompt-mean", prompt), ("--response-mean", mean), ("--response-tail", tail)):
        if value <= 0:
            raise ValueError(f"{option} {value:g}: is not a number of tokens above 0")
    if prompt > data.max_prompt_length:
        raise ValueError(f"--prompt-mean {prompt:g}: is above data.max_prompt_length={data.max_prompt_length}")
    if tail > limit:
        raise ValueError(f"--response-tail {tail:g}: is above data.max_response_length={limit}")
    if mean > tail:
        which = "--response-tail" if assumptions.tail is not None else "data.max_response_length"
        raise ValueError(f"--response-mean {mean:g}: is above {which}={tail:g}")
    return Lengths(prompt, mean, tail, limit)


def rows_of_data(config: RunConfig, assumptions: Assumptions) -> RowCount | None:
    """Return the number of training rows: as given, counted in the files, or of a published data set; else None."""
    data = config.data
    if assumptions.rows is not None:
        rows = RowCount(assumptions.rows, "by --rows")
    else:
        counts = [_rows(file) for file in data.train_files]
        known = [count for count in counts if count is not None]
        if not counts or len(known) < len(counts):
            return None
        rows = RowCount(
            sum(count.count for count in known), " and ".join(dict.fromkeys(count.source for count in known))
        )
    if 0 <= data.train_max_samples < rows.count:
        return RowCount(data.train_max_samples, "by data.train_max_samples")
    return rows


def _rows(file: str) -> RowCount | None:
    path = Path(file).expanduser()
    if path.is_file() and path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return RowCount(sum(1 for line in lines if line.strip()), f"counted in {path.name}")
    if path.is_file() and path.suffix == ".parquet":
        from pyarrow.parquet import read_metadata

        return RowCount(int(read_metadata(path).num_rows), f"counted in {path.name}")
    return next((rows for word, rows in ROWS.items() if word in file.lower()), None)
