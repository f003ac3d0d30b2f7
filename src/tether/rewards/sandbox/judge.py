"""Turns the tests of a row into programs to run, and how they ended into verdicts."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.rewards.sandbox import harness
from tether.rewards.sandbox.blocks import find_blocks
from tether.rewards.sandbox.cases import CallTest, StdioTest, Test
from tether.rewards.sandbox.imports import with_imports
from tether.rewards.sandbox.languages import LANGUAGES
from tether.rewards.sandbox.limits import Finished

_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_TOLERANCE = 1e-6
_DEEP = f"import sys\nsys.setrecursionlimit({harness.MOST_CALLS})"
_HARNESS = Path(harness.__file__).read_text()


@dataclass(frozen=True)
class Job:
    """A program to be run once."""

    language: str
    source: str
    stdin: bytes
    passed: Callable[[Finished], bool]
    """Whether a run that went well gave the expected result."""


@dataclass(frozen=True)
class Answer:
    """The program in a response."""

    language: str
    source: str


def find_answer(response: str, languages: Collection[str], *, raw: bool = False) -> Answer | None:
    """The last block of code in one of the languages; without one, the last block that names none, in the first.

    What is thought before ``</think>`` is no part of the answer. A response without any
    block is the program itself where the first language is Python and all of it parses.

    Args:
        response: text with blocks (`find_blocks`).
        languages: names of `LANGUAGES`.
        raw: such a response is code whether it parses or not: it may be the body of a function.
    """
    text = _said(response)
    names, blocks = _names(languages), find_blocks(text, _names(LANGUAGES))
    tagged = [Answer(name, block.code) for block in blocks if (name := _language(block.tag, names))]
    default = next(iter(languages))
    untagged = [Answer(default, block.code) for block in blocks if not block.tag]
    is_code = "```" not in text and (raw or (default == "python" and _is_python(text)))
    whole = [Answer(default, text)] if is_code else []
    return next(iter([*tagged[::-1], *untagged[::-1], *whole]), None)


def language_of(response: str) -> str | None:
    """The language that the last block of code says it is in; None: there is no block."""
    names = _names(LANGUAGES)
    tags = [block.tag for block in find_blocks(_said(response), names)]
    return (_language(tags[-1], names) or tags[-1]) if tags else None


def _said(response: str) -> str:
    """A response without the thoughts before it, which may have drafts."""
    return response.rpartition("</think>")[2]


def _names(languages: Iterable[str]) -> dict[str, str]:
    """Tag of a block of code -> its language."""
    return {tag: name for name in languages for tag in (name, *LANGUAGES[name].tags)}


def _language(tag: str, names: Mapping[str, str]) -> str | None:
    """The language of a tag, which may name a version, too."""
    return names.get(tag) or names.get(tag.rstrip("0123456789"))


def _is_python(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def job_for(test: Test, answer: Answer) -> Job:
    """The program that puts an answer to a test."""
    if isinstance(test, StdioTest):
        expected = test.expected
        source = with_imports(answer.source, before=_DEEP) if answer.language == "python" else answer.source
        return Job(answer.language, source, test.stdin.encode(), lambda end: same_output(_text(end), expected))
    if isinstance(test, CallTest):
        result, code = test.expected, with_imports(answer.source, frozenset({test.function}))
        request = {"code": code, "function": test.function, "arguments": harness.encode(test.arguments)}
        return _harnessed(request, lambda end: _same_result(end.stdout, result))
    code = with_imports(_behind(test.prompt, answer.source), frozenset(test.functions.values()))
    proof = secrets.token_hex(16)
    asked: dict[str, object] = {"code": code, "tests": test.tests, "functions": test.functions, "proof": proof}
    return _harnessed(asked, lambda end: end.stdout.endswith(proof.encode()))


def _behind(prompt: str, source: str) -> str:
    """An answer behind the code that it completes; what has to stand first in a file, comes first."""
    return "\n".join([*_FUTURE.findall(source), prompt, _FUTURE.sub("", source)])


def _harnessed(request: dict[str, object], passed: Callable[[Finished], bool]) -> Job:
    return Job("python", _HARNESS, json.dumps(request).encode(), passed)


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same words in the same lines; expected decimal numbers may be missed by 1e-6.

    Spaces around words, and empty lines, do not count.
    """
    ours, theirs = (list(filter(str.strip, text.splitlines())) for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_words, ours, theirs))


def _same_words(our_line: str, their_line: str) -> bool:
    ours, theirs = our_line.split(), their_line.split()
    return len(ours) == len(theirs) and all(
        one == other or _near(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def _near(printed: str, expected: str) -> bool:
    if not {".", "e", "E"} & set(printed + expected):
        return False  # whole numbers are equal or not
    try:
        if expected.lstrip("-").isdecimal():
            return float(printed).is_integer() and int(float(printed)) == int(expected)
        return math.isclose(float(printed), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _same_result(stdout: bytes, expected: object) -> bool:
    """Whether a call returned what is expected: tuples are lists, and APPS wraps some results into a list."""
    try:
        if _is_larger(stdout, json.dumps(harness.encode(expected))):
            return False
        result = _as_json(json.loads(stdout))
        return _equal(result, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0])
        )
    except Exception:  # noqa: BLE001 - whatever an answer writes is a wrong result, never an error of the row
        return False


def _is_larger(stdout: bytes, expected: str) -> bool:
    """Whether a result is larger than any that equals what is expected, so that reading it would cost time only.

    Such a result has as many commas, and one more for each complex number. Its numbers may be longer.
    """
    return stdout.count(b",") > 1 + 2 * expected.count(",") or len(stdout) > 1000 + 50 * len(expected)


def _as_json(value: Any) -> object:
    """The result of a call, as JSON represents it. Only strings are hashed: numbers could be chosen to collide."""
    if isinstance(value, list):
        return list(map(_as_json, value))
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": items}:
            return list(map(_as_json, items))
        case {"dict": pairs}:
            return {_named(_key(key)): _as_json(item) for key, item in pairs}
        case {"int": digits}:
            return int(digits, 16)
        case {"complex": parts}:
            return complex(*parts)
    raise ValueError("JSON has nothing that is equal to it")


def _named(key: object) -> str:
    """A key as JSON writes it."""
    return json.dumps(key) if key is None or isinstance(key, bool) else str(key)


def _key(value: object) -> object:
    if isinstance(value, dict) and "tuple" in value:
        return tuple(map(_key, value["tuple"]))
    return _as_json(value)


def _equal(result: object, expected: object) -> bool:
    if (
        float in (type(result), type(expected))
        and isinstance(result, int | float)
        and isinstance(expected, int | float)
    ):
        try:
            return result == expected or (
                not isinstance(expected, int) and math.isclose(result, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            )
        except OverflowError:  # a whole number above all floats
            return False
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_equal, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_equal(result[key], expected[key]) for key in expected)
    return bool(result == expected)


def _text(end: Finished) -> str:
    return end.stdout.decode(errors="replace")
