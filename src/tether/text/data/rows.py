"""The row format to which every data source is converted.

It is verl's: one prompt per row, with the inputs of the reward::

    data_source   "openai/gsm8k"                                  selects the reward
    prompt        [{"role": "user", "content": "1 + 1?"}]         or a string: one user message
    reward_model  {"style": "rule", "ground_truth": "2"}          any other style needs no ground truth
    extra_info    {"split": "train", "index": 0}                  optional, passed to the reward unchanged

Other columns are ignored, unless the user names them or the source has a published layout (`tether.text.data.columns`).
Row indices start at 0 in each file.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from tether.text.data.columns import Columns, naming_advice
from tether.text.turns.config import ENDPOINT
from tether.types import ExtraInfo, JsonObject

if TYPE_CHECKING:
    from tether.batch import Prompt, TokenIds

MAX_PROBLEMS = 10
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
MEDIA_KEYS = ("images", "videos")
SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
"""verl's agent names: a single response, or turns with tools."""
LAYOUT = (
    "A row needs `prompt` (a list of {role, content}, or a string), `data_source` and "
    "`reward_model` {style, ground_truth}; `extra_info` is optional"
)
_USUAL_COLUMNS = ("prompt", "reward_model", "data_source")
_USUAL = Columns()
_NAMED_BY = {"question": "data.prompt_key", "answer": "data.answer_key", "data_source": "data.reward_fn_key"}
"""Settings that rename a column, for messages."""


class Records(Protocol):
    """The raw rows of one source, read on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> object:
        """Return row `number` as a mapping in the format above; a custom dataset may return a `Prompt` instead."""
        ...


@dataclass(frozen=True)
class RowSource:
    """One file, hub dataset or procedural task."""

    name: str
    records: Records
    keys: tuple[str, ...]
    """Names of the source's columns; empty if each row has its own."""
    generated: bool = False
    """Whether the rows were generated at random, so that they may repeat each other."""
    columns: Columns = field(default_factory=Columns)
    from_columns: bool = False
    """Whether the rows come from typed columns (Parquet, `datasets`), whose mappings have the keys of all rows, with
    null for missing ones."""


@dataclass(frozen=True)
class Row:
    """A validated row."""

    messages: tuple[JsonObject, ...]
    data_source: str
    ground_truth: object
    file: str
    number: int
    extra_info: ExtraInfo = field(default_factory=dict)
    token_ids: TokenIds | None = None
    """Token ids, if a custom dataset applied the template itself."""
    agent_name: str | None = None
    """Name of the agent that replies to the policy between its turns; None: the run's default."""
    from_columns: bool = False
    """Whether the row comes from typed columns, as in `RowSource`."""

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        return own_tools(self.extra_info)

    @property
    def place(self) -> str:
        """File and index of the row, for error messages."""
        return f"{self.file} row {self.number}"


@dataclass(frozen=True)
class RowAgent:
    """What replies to the policy between its turns."""

    has_tools: bool
    environment: str | None
    """Name of a class that replies to each turn (with tools: to each turn without a tool call)."""


def agent_of(name: str, extra_info: ExtraInfo) -> RowAgent:
    """Return the agent of a row with this agent name and `extra_info`."""
    if name in (SINGLE_TURN, ENDPOINT):
        return RowAgent(False, None)
    if name == TOOL_AGENT:
        wanted = extra_info.get("interaction_kwargs")
        return RowAgent(True, wanted.get("name") if isinstance(wanted, Mapping) else None)
    return RowAgent(False, name)


def own_tools(extra_info: Mapping[str, Any]) -> Sequence[Mapping[str, object]]:
    """Return the schemas of the tools of a row's environment (`tether.integrations.agents.environment_rows`)."""
    environment = extra_info.get("verifiers")
    return environment.get("tools", ()) if isinstance(environment, Mapping) else ()


class Rows:
    """The concatenated rows of all sources, parsed on access.

    Args:
        sources: one or more sources.
        problems: known problems, to report together with those of the rows.

    Raises:
        ValueError: rows are invalid; lists up to ten with file, index and fix.
    """

    def __init__(self, sources: Sequence[RowSource], problems: Sequence[str] = ()) -> None:
        row_problems = [problem for source in sources for problem in _source_problems(source)]
        raise_problems([*problems, *row_problems])
        self.sources = tuple(sources)
        self._ends = list(accumulate(len(source.records) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        source = self.sources[which]
        number = index - (self._ends[which - 1] if which else 0)
        return _to_row(source.records[number], source, number)

    def recognised(self) -> list[str]:
        """Return descriptions of the sources whose layout was recognised by their columns."""
        return [f"{source.name} is read as {source.columns}" for source in self.sources if source.columns.recognised_as]

    def is_generated(self, index: int) -> bool:
        """Whether row `index` was generated by a procedural task."""
        return self.sources[bisect_right(self._ends, index)].generated

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


def _source_problems(source: RowSource) -> list[str]:
    columns = source.columns
    if not len(source.records):
        return [f"{source.name}: no rows. Name a file with at least one, or take it off the list."]
    needed = {"question": columns.prompt, "answer": columns.answer or "reward_model"}
    if columns.default_source is None:
        needed["data_source"] = columns.data_source
    missing = {
        option: f"`{key}`" if key in _USUAL_COLUMNS else f"`{key}` ({_NAMED_BY[option]})"
        for option, key in needed.items()
        if key not in source.keys
    }
    if source.keys and missing:
        return [
            f"{source.name}: not in the row layout: no {', '.join(missing.values())}; its keys are "
            f"{', '.join(source.keys)}. "
            f"{LAYOUT}. {naming_advice(source.name, source.keys, list(missing))}"
        ]
    return [
        f"{source.name} row {number}: {problem}"
        for number in range(len(source.records))
        for problem in record_problems(source.records[number], columns)
    ]


def record_problems(record: object, columns: Columns = _USUAL) -> Iterator[str]:
    """Yield every problem of a raw row with the layout."""
    if _is_prompt(record):
        if len(record.token_ids) == 0:
            yield "a Prompt without token_ids."
        return
    if not isinstance(record, Mapping):
        yield f"a {type(record).__name__}, not an object with keys. {LAYOUT}."
        return
    prompt = record.get(columns.prompt)
    yield from prompt_problems(prompt, columns.prompt)
    if (
        columns.system is not None
        and isinstance(prompt, list)
        and any(_role(message) == "system" for message in prompt)
    ):
        yield f"`{columns.prompt}` has a system message already; take `system` out of the source's options."
    if isinstance(prompt, str | list):
        yield from half_characters(prompt, columns.prompt)
    if not isinstance(source := _source_of(record, columns), str):
        what = f"no `{columns.data_source}`" if source is None else f"`{columns.data_source}` is {source!r:.80}"
        yield f"{what}. It names the reward, for example openai/gsm8k (see data.reward_fn_key)."
    elif _CONTROL.search(source):
        yield f"`{columns.data_source}` is {source!r:.80}, with a control character. Correct the row."
    if columns.answer is None:
        yield from _reward_problems(record.get("reward_model"))
    else:
        yield from _answer_problems(record.get(columns.answer), columns)
    if not isinstance(record.get("extra_info") or {}, Mapping):
        yield f"`extra_info` is {record['extra_info']!r}, not an object with keys."
    if not isinstance(agent := record.get("agent_name") or SINGLE_TURN, str):
        yield f"`agent_name` is {agent!r}, not a name."
    for key in MEDIA_KEYS:
        if record.get(key):
            yield f"`{key}` is not empty, but only text prompts are read. Drop the column, or the row."


def _is_prompt(record: object) -> TypeGuard[Prompt]:
    """Whether a row is a custom dataset's `Prompt`. Rows of files are tested first, so that torch is not imported."""
    if isinstance(record, Mapping):
        return False
    from tether.batch import Prompt

    return isinstance(record, Prompt)


def prompt_problems(prompt: object, key: str) -> Iterator[str]:
    """Yield problems with a text or conversation that is missing or has another type."""
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


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def half_characters(prompt: Any, key: str) -> Iterator[str]:
    """Yield problems with lone surrogates in a text or conversation, which no tokenizer accepts."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt if isinstance(m, Mapping)]
    for text in texts:
        if isinstance(text, str) and (match := _SURROGATE.search(text)):
            yield (
                f"`{key}` holds half a character ({match[0]!a} at position {match.start()}), which no encoding "
                "can write. The text was cut inside a character; write the row again from its source."
            )


def _reward_problems(reward_model: object) -> Iterator[str]:
    if not isinstance(reward_model, Mapping):
        what = "no `reward_model`" if reward_model is None else f"`reward_model` is {reward_model!r:.80}"
        yield f"{what}, so no ground truth. Give {{style, ground_truth}}."
    elif reward_model.get("style", "rule") == "rule" and _is_missing(reward_model.get("ground_truth")):
        yield "no `reward_model.ground_truth`. A row of style `rule` needs one; rows of style `model` need none."


def _answer_problems(answer: object, columns: Columns) -> Iterator[str]:
    key = columns.answer
    if _is_missing(answer) or answer == "" or answer == []:
        yield f"no `{key}`, so no right answer."
    elif columns.layout and (not isinstance(answer, str) or columns.layout.extract(answer) is None):
        yield f"no {columns.layout.mark} in `{key}`, as {columns.layout.name} has it. Correct the row, or drop it."
    elif isinstance(answer, list) and len(answer) > 1:
        yield f"`{key}` has {len(answer)} answers. Rules compare with one: leave one."


def _is_missing(value: object) -> bool:
    """Whether a value is None, or NaN, which tables have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _source_of(record: Mapping[str, object], columns: Columns) -> Any:
    named = record.get(columns.data_source)
    return columns.default_source if named is None else named


def _truth(record: JsonObject, columns: Columns) -> object:
    if columns.answer is None:
        return record["reward_model"].get("ground_truth")
    answer = record[columns.answer]
    if columns.layout:
        return columns.layout.extract(answer)
    return answer[0] if isinstance(answer, list) else answer


def _to_row(record: Any, source: RowSource, number: int) -> Row:
    columns = source.columns
    if _is_prompt(record):
        return Row(
            messages=record.messages,
            data_source=record.data_source,
            ground_truth=record.ground_truth,
            file=source.name,
            number=number,
            extra_info=record.extra_info,
            token_ids=record.token_ids,
            agent_name=record.agent_name,
            from_columns=source.from_columns,
        )
    prompt = record[columns.prompt]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if columns.system is not None:
        messages = [{"role": "system", "content": columns.system}, *messages]
    if columns.suffix:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + columns.suffix}]
    return Row(
        # A parquet struct has all messages' keys, null where missing, but templates test whether a key exists.
        messages=tuple({key: value for key, value in message.items() if value is not None} for message in messages),
        data_source=_source_of(record, columns),
        ground_truth=_truth(record, columns),
        file=source.name,
        number=number,
        extra_info=dict(record.get("extra_info") or {}),
        agent_name=record.get("agent_name") or None,
        from_columns=source.from_columns,
    )
