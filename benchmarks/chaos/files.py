"""Broken data files: each is refused in one message that names the file, never by a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.tiny import tiny_tokenizer
from tether.text.data.prompts import PromptDataset, PromptOptions
from tether.text.data.sources import load_rows

GOOD: dict[str, Any] = {
    "data_source": "toy",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def bad_files() -> Mapping[str, bytes]:
    """File name -> content."""
    line = json.dumps(GOOD)
    rows: dict[str, Any] = {
        "no prompt": {**GOOD, "prompt": None},
        "empty prompt": {**GOOD, "prompt": ""},
        "empty conversation": {**GOOD, "prompt": []},
        "number for a prompt": {**GOOD, "prompt": 7},
        "mapping for a prompt": {**GOOD, "prompt": {"role": "user", "content": "x"}},
        "message without content": {**GOOD, "prompt": [{"role": "user"}]},
        "message without role": {**GOOD, "prompt": [{"content": "x"}]},
        "number as content": {**GOOD, "prompt": [{"role": "user", "content": 3}]},
        "content in parts": {**GOOD, "prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "text for a message": {**GOOD, "prompt": ["hello"]},
        "null message": {**GOOD, "prompt": [None]},
        "half a character": {**GOOD, "prompt": [{"role": "user", "content": "x \ud83d"}]},
        "half a character in a string": {**GOOD, "prompt": "x \udc00"},
        "overlong prompt": {**GOOD, "prompt": "x" * 5000},
        "no source": {**GOOD, "data_source": None},
        "number as source": {**GOOD, "data_source": 3},
        "no reward": {**GOOD, "reward_model": None},
        "text as reward": {**GOOD, "reward_model": "2"},
        "no ground truth": {**GOOD, "reward_model": {"style": "rule"}},
        "null ground truth": {**GOOD, "reward_model": {"ground_truth": None}},
        "list as extra": {**GOOD, "extra_info": [1]},
        "text as extra": {**GOOD, "extra_info": "x"},
        "images": {**GOOD, "images": ["a.png"]},
        "videos": {**GOOD, "videos": ["a.mp4"]},
        "a list": [1, 2],
        "a number": 7,
        "null": None,
        "other columns": {"text": "x", "label": 1},
        "chat of another layout": {"conversations": [{"from": "human", "value": "x"}]},
    }
    files = {f"{name}.jsonl": f"{line}\n{json.dumps(row)}\n".encode() for name, row in rows.items()}
    return files | {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n\n\n",
        "empty list.json": b"[]",
        "empty.parquet": b"",
        "text.parquet": b"not parquet",
        "parquet.jsonl": _parquet([GOOD]),
        "half a parquet.parquet": _parquet([GOOD])[:-40],
        "no rows.parquet": _parquet([GOOD], rows=0),
        "wrong columns.parquet": _parquet([{"text": "x"}]),
        "cut line.jsonl": line.encode()[:-5] + b"\n",
        "single quotes.jsonl": b"{'prompt': 'x'}\n",
        "latin 1.jsonl": json.dumps({**GOOD, "prompt": "é"}, ensure_ascii=False).encode("latin-1"),
        "utf 16.jsonl": line.encode("utf-16"),
        "zeros.jsonl": b"\0" * 100,
        "nan.jsonl": b"NaN\n",
        "nested.json": b"[" * 2000 + b"]" * 2000,
        "csv.csv": b"prompt\nx\n",
    }


def _parquet(records: list[dict[str, Any]], rows: int | None = None) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records).slice(0, rows), sink)
    return sink.getvalue().to_pybytes()


def measure(folder: Path) -> tuple[int, int, list[str]]:
    """Read each file as a run does before it loads a model.

    Returns:
        Files refused properly and tried, and a line for each that was not.
    """
    failures = []
    files = bad_files()
    for name, content in files.items():
        path = folder / name
        path.write_bytes(content)
        try:
            PromptDataset(load_rows([str(path)]), tiny_tokenizer(), PromptOptions(max_prompt_length=512))
        except ValueError as error:
            if type(error) is not ValueError or str(path) not in str(error):
                failures.append(f"{name}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  whatever it is, it is a failure to be counted
            failures.append(f"{name}: {type(error).__name__}: {error}")
        else:
            failures.append(f"{name}: taken")
    return len(files) - len(failures), len(files), failures
