"""Exports what a run did as one HTML file, which opens from disk without a server or a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

from tether.view.page import answer
from tether.view.queries import AXES
from tether.view.run import RunFolder
from tether.view.server import STATIC

MAX_BYTES = 20_000_000
SCRIPTS = ("chart.js", "text.js", "advice.js", "strip.js", "reward.js", "trend.js", "step.js", "control.js", "app.js")
"""The script modules in the order in which they are joined; each only uses earlier ones."""


def write_page(runs: Sequence[RunFolder], path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Write runs to one HTML file, and return a sentence about it that mentions omitted data.

    Args:
        runs: the runs.
        path: the file.
        max_bytes: its maximum size in bytes.

    Raises:
        ValueError: the file cannot be written.
    """
    style, script = (STATIC / "style.css").read_text(), _script()
    room = max_bytes - len(style) - len(script) - 20_000
    answers: dict[str, object] = {}
    left_out, num_questions = 0, 0
    for question, arguments in _questions(runs):
        num_questions += 1
        try:
            value = answer(runs, question, arguments)
        except ValueError:
            continue
        size = len(_embedded(value)) + 100
        if size > room:
            left_out += 1
            continue
        room -= size
        answers[address(question, arguments)] = value
    page = _page(style, script, _embedded(answers))
    try:
        path.write_bytes(page)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror}); give another file") from error
    missing = (
        f"; {left_out} of {num_questions} tables, samples and curves did not fit and are left out" if left_out else ""
    )
    return f"{path}: {len(page) / 1e6:.1f} MB, opens without a server{missing}"


def address(question: str, arguments: dict[str, str]) -> str:
    """Return the address under which the page requests the answer to a question."""
    return f"{question}?{urlencode(sorted(arguments.items()))}"


def _questions(runs: Sequence[RunFolder]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield all questions that the page may ask, the most important first."""
    yield "runs", {}
    for index, run in enumerate(runs):
        number = {"run": str(index)}
        yield "overview", number
        for axis in AXES:
            yield "curves", {**number, "keys": ",".join(run.keys), "axis": axis}
        for question in ("parts", "tasks", "prompts"):
            yield question, number
    if len(runs) > 1:
        for key in sorted({key for run in runs for key in run.keys}):
            yield "mean_curves", {"key": key, "axis": "step"}
    for index, run in enumerate(runs):
        yield from _steps(run, {"run": str(index)})


def _steps(run: RunFolder, number: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the questions about steps of a run: last, first and middle step, then ever finer subdivisions."""
    for step in run.validation_steps[::-1]:
        yield "validation", {**number, "step": str(step)}
    detail, kind = ("sample", "tokens") if run.kind == "text" else ("episode", "episodes")
    for step in _spread(run.steps):
        at = {**number, "step": str(step)}
        yield "samples", at
        yield "distributions", at
        if run.kind == "text":
            yield "groups", at
        recorded = run.record(kind, step) or {"rows": []}
        for row in recorded["rows"]:
            yield detail, {**at, "row": str(row["row" if run.kind == "text" else "segment"])}


def _spread(steps: Sequence[int]) -> list[int]:
    """Order steps so that every prefix of the list covers the run evenly."""
    ordered = list(steps[-1:])
    width = len(steps)
    while width:
        ordered += [steps[at] for at in range(0, len(steps), width) if steps[at] not in ordered]
        width //= 2
    return ordered


def _script() -> str:
    """Join the modules to one script."""
    joined = []
    for name in SCRIPTS:
        text = re.sub(r"^import .*?;\n", "", (STATIC / name).read_text(), flags=re.MULTILINE | re.DOTALL)
        joined.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "'use strict';\n" + "\n".join(joined)


def _embedded(value: object) -> str:
    """Return a value as JSON that cannot close the HTML element that contains it."""
    return json.dumps(value, default=str, separators=(",", ":")).replace("<", "\\u003c")


def _page(style: str, script: str, data: str) -> bytes:
    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; img-src data:"
    body = re.search(r"<body>.*</body>", (STATIC / "index.html").read_text(), re.DOTALL)
    assert body
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>tether</title>\n'
        f"<style>{style}</style></head>\n{body[0].replace('</body>', '')}\n"
        f'<script type="application/json" id="answers">{data}</script>\n<script>{script}</script></body></html>\n'
    ).encode()
