"""Runs of a benchmark that are kept in a file of JSON lines, so that it resumes; and tables in pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def all_runs(
    make: Callable[..., Mapping[str, object]], asked: Sequence[Mapping[str, Any]], file: Path, *, made_only: bool
) -> list[dict[str, Any] | None]:
    """The results of runs, one after the other; those that the file has are taken from there.

    Args:
        make: does one, given what is asked for.
        asked: of each run; it names the run in the file.
        file: of runs that are done.
        made_only: make no new run; those that the file lacks are None.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    done = {_name(line["asked"]): line["result"] for line in map(json.loads, lines)}
    for one in asked:
        if _name(one) in done or made_only:
            continue
        result = done[_name(one)] = dict(make(**one))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps({"asked": one, "result": result}) + "\n")
        print(f"done: {one}", file=sys.stderr, flush=True)
    return [done.get(_name(one)) for one in asked]


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Put a table between two marks of a page.

    Raises:
        ValueError: the page has no such marks.
    """
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{page}: no {begin} ... {end} to write between")
    page.write_text(f"{text.split(begin)[0]}{begin}\n{table}\n{end}{text.split(end)[1]}", encoding="utf-8")


def _name(asked: Mapping[str, object]) -> str:
    return json.dumps(asked, sort_keys=True)
