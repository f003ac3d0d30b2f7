"""The row layout that every data source is brought to.

It is verl's: one prompt a row, with what the reward needs beside it::

    data_source   "openai/gsm8k"                                  which reward scores the reply
    prompt        [{"role": "user", "content": "1 + 1?"}]         or a string: one user message
    reward_model  {"style": "rule", "ground_truth": "2"}          any other style needs no ground truth
    extra_info    {"split": "train", "index": 0}                  optional, handed to the reward as it is

Other columns are not read. Rows are counted from 0, within their file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Protocol

from tether.batch import Prompt

MAX_PROBLEMS = 10
MEDIA_KEYS = ("images", "videos")
LAYOUT = (
    "A row needs `prompt` (a list of {role, content}, or a string), `data_source` and "
    "`reward_model` {style, ground_truth}; `extra_info` is optional"
)


class Records(Protocol):
    """The raw rows of one source, read when asked for."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, number: int, /) -> Any:
        """Row `number` as a mapping in the layout above; a custom dataset may give a `Prompt` instead."""
        ...


@dataclass(frozen=True)
class Source:
    """One file, hub dataset or procedural task."""

    name: str
    records: Records
    keys: tuple[str, ...]
    """What the source calls its columns; empty where every row stands for itself."""


@dataclass(frozen=True)
class Columns:
    """How the columns are called whose names are the user's choice."""

    prompt: str = "prompt"
    data_source: str = "data_source"
    answer: str | None = None
    """Column of right answers; None: they stand in ``reward_model``."""
    default_source: str | None = None
    """`data_source` of rows that have none; None: each must have one."""


@dataclass(frozen=True)
class Row:
    """One row, checked."""

    messages: tuple[dict[str, Any], ...]
    data_source: str
    ground_truth: Any
    file: str
    number: int
    extra_info: dict[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] | None = None
    """Set where a custom dataset did the templating itself."""

    @property
    def place(self) -> str:
        """Where the row stands, for error messages."""
        return f"{self.file} row {self.number}"


class Rows:
    """The rows of all sources, end to end, parsed when asked for.

    Args:
        sources: at least one.
        columns: names of the two columns that can be called otherwise.
        problems: what is known to be wrong already, to be reported together with what is found here.

    Raises:
        ValueError: rows that break the layout, up to ten of them by file, row number and fix.
    """

    def __init__(self, sources: Sequence[Source], columns: Columns = Columns(), problems: Sequence[str] = ()) -> None:
        found = [problem for source in sources for problem in _source_problems(source, columns)]
        raise_problems([*problems, *found])
        self.sources = tuple(sources)
        self._columns = columns
        self._ends = list(accumulate(len(source.records) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        source = self.sources[which]
        number = index - (self._ends[which - 1] if which else 0)
        return _to_row(source.records[number], source.name, number, self._columns)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ValueError that lists the first ten problems and counts the others; nothing if there are none."""
    if not problems:
        return
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"... and {len(problems) - MAX_PROBLEMS} more")
    raise ValueError("\n".join(shown))


def closest(word: str, known: Sequence[str]) -> str:
    """Return ``' Did you mean `x`?'`` for the known word nearest to `word`, or nothing."""
    match = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean `{match[0]}`?" if match else ""


def _source_problems(source: Source, columns: Columns) -> list[str]:
    if not len(source.records):
        return [f"{source.name}: no rows. Name a file with at least one, or take it off the list."]
    needed = [columns.prompt, columns.answer or "reward_model"]
    if columns.default_source is None:
        needed.append(columns.data_source)
    missing = [f"`{key}`" for key in needed if key not in source.keys]
    if source.keys and missing:
        return [
            f"{source.name}: not in the row layout: no {', '.join(missing)}; its keys are {', '.join(source.keys)}. "
            f"{LAYOUT}. Rewrite the file, or name the columns with data.prompt_key, data.answer_key and "
            "data.reward_fn_key; data.data_source serves rows without one."
        ]
    return [
        f"{source.name} row {number}: {problem}"
        for number in range(len(source.records))
        for problem in _record_problems(source.records[number], columns)
    ]


def _record_problems(record: Any, columns: Columns) -> Iterator[str]:
    if isinstance(record, Prompt):
        if not record.token_ids:
            yield "a Prompt without token_ids."
        return
    if not isinstance(record, Mapping):
        yield f"a {type(record).__name__}, not an object with keys. {LAYOUT}."
        return
    yield from _prompt_problems(record.get(columns.prompt), columns.prompt)
    if not isinstance(_source_of(record, columns), str):
        yield f"no `{columns.data_source}`. It names the reward, for example openai/gsm8k (see data.reward_fn_key)."
    if columns.answer is None:
        yield from _reward_problems(record.get("reward_model"))
    else:
        yield from _answer_problems(record.get(columns.answer), columns.answer)
    if not isinstance(record.get("extra_info") or {}, Mapping):
        yield f"`extra_info` is {record['extra_info']!r}, not an object with keys."
    for key in MEDIA_KEYS:
        if record.get(key):
            yield f"`{key}` is not empty, but only text prompts are read. Drop the column, or the row."


def _prompt_problems(prompt: Any, key: str) -> Iterator[str]:
    if prompt is None or prompt == "" or prompt == []:
        yield f"no `{key}`. Give a list of {{role, content}}, or a string."
    elif isinstance(prompt, list):
        for position, message in enumerate(prompt):
            text = isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))
            if not text:
                shown = repr(message)[:80]
                yield f"`{key}`[{position}] is {shown}. A message is {{role, content}}, both strings."
    elif not isinstance(prompt, str):
        yield f"`{key}` is a {type(prompt).__name__}. Give a list of {{role, content}}, or a string."


def _reward_problems(reward_model: Any) -> Iterator[str]:
    if not isinstance(reward_model, Mapping):
        yield "no `reward_model`, so no ground truth. Give {style, ground_truth}."
    elif reward_model.get("style", "rule") == "rule" and reward_model.get("ground_truth") is None:
        yield "no `reward_model.ground_truth`. A row of style `rule` needs one; rows of style `model` need none."


def _answer_problems(answer: Any, key: str) -> Iterator[str]:
    if answer is None or answer == "" or answer == []:
        yield f"no `{key}`, so no right answer."
    elif isinstance(answer, list) and len(answer) > 1:
        yield f"`{key}` has {len(answer)} answers. Rules compare with one: leave one."


def _source_of(record: Mapping[str, Any], columns: Columns) -> Any:
    named = record.get(columns.data_source)
    return columns.default_source if named is None else named


def _truth(record: Mapping[str, Any], columns: Columns) -> Any:
    if columns.answer is None:
        return record["reward_model"].get("ground_truth")
    answer = record[columns.answer]
    return answer[0] if isinstance(answer, list) else answer


def _to_row(record: Any, file: str, number: int, columns: Columns) -> Row:
    if isinstance(record, Prompt):
        return Row(
            messages=record.messages,
            data_source=record.data_source,
            ground_truth=record.ground_truth,
            file=file,
            number=number,
            extra_info=record.extra_info,
            token_ids=record.token_ids,
        )
    prompt = record[columns.prompt]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Row(
        # A parquet struct holds null for the keys that other messages have; templates ask whether a key is there.
        messages=tuple({key: value for key, value in message.items() if value is not None} for message in messages),
        data_source=_source_of(record, columns),
        ground_truth=_truth(record, columns),
        file=file,
        number=number,
        extra_info=dict(record.get("extra_info") or {}),
    )
