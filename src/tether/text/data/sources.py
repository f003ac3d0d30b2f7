"""Reads rows from parquet, json and jsonl files, the Hugging Face hub, procedural tasks and environments."""

from __future__ import annotations

import importlib
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tether.integrations import integration
from tether.text.data.columns import LAYOUT_KEYS, Columns
from tether.text.data.location import expand, locate
from tether.text.data.rows import MEDIA_KEYS, Rows, RowSource


def load_rows(
    files: str | Sequence[str],
    *,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    answer_key: str | None = None,
    data_source: str | None = None,
    first: int | None = None,
) -> Rows:
    """Read all sources of `files`, in list order, as one dataset.

    Args:
        files: one source or several, of mixed kinds:
            a path that ends in .parquet, .json (a list, or one object per line) or .jsonl, or a pattern or folder of
            these; ``owner/name`` or ``owner/name?split=train&name=main&revision=...`` on the Hugging Face hub; both
            with optional ``question``, ``answer``, ``data_source``, ``system`` and ``suffix`` after the ``?``;
            ``reasoning_gym:task?size=2000&seed=1&...`` (see `tether.text.data.procedural`);
            ``verifiers:environment?argument=value&...`` (see `tether.integrations.agents.environment_rows`).
        prompt_key: column of the prompt.
        reward_fn_key: column of the reward's name.
        answer_key: column of the correct answer, or of a list that contains only it; None: it is in ``reward_model``.
        data_source: reward's name for rows without that column; None: each row must have it.
        first: maximum number of rows to read per file, for a preview; None: all.

    Raises:
        ValueError: a source is missing, unreadable or empty, or rows are invalid; lists up to ten problems.
    """
    names = [files] if isinstance(files, str) else list(files)
    if not names:
        raise ValueError("data files: the list is empty. Name at least one file.")
    columns = Columns(prompt_key, reward_fn_key, answer_key, data_source)
    sources: list[RowSource] = []
    problems: list[str] = []
    for name in names:
        try:
            sources += [read_source(spec, columns, first) for spec in expand(name)]
        except ValueError as error:  # reported together with the problems of other files
            problems.append(str(error))
    return Rows(sources, problems)


def read_source(spec: str, columns: Columns, first: int | None) -> RowSource:
    """Read one source.

    Args:
        spec: one of the forms of `load_rows`, without patterns.
        columns: names of its columns, which options after the ``?`` override.
        first: maximum number of rows to read from a file; None: all.

    Raises:
        ValueError: it is missing or unreadable.
    """
    location = locate(spec)
    # Adapters are imported on first use, so that other sources do not load their packages.
    if location.kind == "task":
        return importlib.import_module("tether.text.data.procedural").read_task(spec, location.name, location.options)
    if location.kind == "environment":
        return integration("agents", "environment_rows").read_environment(spec, location.name, location.options)
    columns = columns.with_options(location.options)
    if location.kind == "file":
        source = READERS[Path(location.name).suffix](Path(location.name), columns, first)
    else:
        source = importlib.import_module("tether.text.data.hub").read_hub(spec, location.name, location.options)
    shown = source.records[0] if len(source.records) else None
    return replace(source, columns=columns.recognised(source.keys, shown))


class ArrowRecords:
    """Rows of an arrow table, converted to Python objects one at a time."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, number: int) -> dict[str, object]:
        return self._table.slice(number, 1).to_pylist(maps_as_pydicts="strict")[0]


def _read_parquet(path: Path, columns: Columns, first: int | None = None) -> RowSource:
    wanted = {
        columns.prompt,
        columns.data_source,
        columns.answer,
        "reward_model",
        "extra_info",
        "chosen",
        "rejected",
        *MEDIA_KEYS,
        *columns.others,
    } | LAYOUT_KEYS
    try:
        keys = pyarrow.parquet.read_schema(path).names
        if twice := [key for key in wanted if keys.count(key) > 1]:
            raise ValueError(f"{path}: several columns are named `{twice[0]}`. Leave one, or rename the others.")
        present = [key for key in keys if key in wanted]
        table = pyarrow.parquet.read_table(path, columns=present) if first is None else _beginning(path, present, first)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
    return RowSource(str(path), ArrowRecords(table), tuple(keys), from_columns=True)


def _beginning(path: Path, keys: Sequence[str], rows: int) -> pyarrow.Table:
    with pyarrow.parquet.ParquetFile(path) as file:
        batches = list(islice(file.iter_batches(rows, columns=keys), 1))
        return pyarrow.Table.from_batches(batches, file.schema_arrow if not batches else None)


def _read_json(path: Path, columns: Columns, first: int | None = None) -> RowSource:
    try:
        with path.open("rb") as file:
            content = b"".join(islice(file, first))
            if content.removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
                content += file.read()
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        if text.lstrip().startswith("["):
            records = _parse_json(text, str(path))[:first]
        else:
            lines = enumerate(text.split("\n"), start=1)
            records = [_parse_json(line, f"{path} line {number}") for number, line in lines if line.strip()]
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"{path} line {line}: the byte {byte:#x} is not UTF-8. Save the file as UTF-8.") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply to be read") from error
    keys = dict.fromkeys(key for record in records if isinstance(record, Mapping) for key in record)
    return RowSource(str(path), records, tuple(keys))


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column" if "\n" in text.strip() else "column"
        problem = f"{place}: not readable as json: {error.msg} at {where} {error.colno}."
        raise ValueError(f"{problem} The file must be one list, or one object a line.") from error
    except ValueError as error:  # a duplicate key, or an integer with thousands of digits
        raise ValueError(f"{place}: {error}") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict; refuse a duplicate key."""
    obj = dict(pairs)
    if len(obj) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key `{twice}` stands twice in one object. Leave one, or rename the other.")
    return obj


READERS: dict[str, Callable[[Path, Columns, int | None], RowSource]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_json,
}
