"""Converts the tests of a row to programs, and decides whether their results are right."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tether.text.rewards.sandbox import harness
from tether.text.rewards.sandbox.blocks import find_blocks
from tether.text.rewards.sandbox.cases import CallTest, StdioTest, Test
from tether.text.rewards.sandbox.imports import with_imports
from tether.text.rewards.sandbox.languages import LANGUAGES
from tether.text.rewards.sandbox.limits import Finished

_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_TOLERANCE = 1e-6
_RECURSION = f"import sys\nsys.setrecursionlimit({harness.MAX_RECURSION})"
_HARNESS = Path(harness.__file__).read_text()


@dataclass(frozen=True)
class Job:
    """A program that is run once."""

    language: str
    source: str
    stdin: bytes
    passed: Callable[[Finished], bool]
    """Returns whether a run that succeeded has the expected result."""


@dataclass(frozen=True)
class Answer:
    """The program in a response."""

    language: str
    source: str


def find_answer(response: str, languages: Collection[str], *, raw: bool = False) -> Answer | None:
    """Return the last code block in one of the languages, otherwise the last block without a language.

    A block without a language is in the first of `languages`. Reasoning before ``</think>`` is ignored. A response
    without any block is itself the program if the first language is Python and it parses.
    Args:
        response: text with blocks (`find_blocks`).
        languages: names in `LANGUAGES`.
        raw: whether a response without blocks is code even if it does not parse; it may be the body of a function.
    """
    text = _without_reasoning(response)
    names, blocks = _names(languages), find_blocks(text, _names(LANGUAGES))
    tagged = [Answer(name, block.code) for block in blocks if (name := _language(block.tag, names))]
    default = next(iter(languages))
    untagged = [Answer(default, block.code) for block in blocks if not block.tag]
    is_code = "```" not in text and (raw or (default == "python" and _is_python(text)))
    unfenced = [Answer(default, text)] if is_code else []
    return next(iter([*tagged[::-1], *untagged[::-1], *unfenced]), None)


def language_of(response: str) -> str | None:
    """Return the language in the info string of the last code block; None if there is no block."""
    names = _names(LANGUAGES)
    tags = [block.tag for block in find_blocks(_without_reasoning(response), names)]
    return (_language(tags[-1], names) or tags[-1]) if tags else None


def _without_reasoning(response: str) -> str:
    return response.rpartition("</think>")[2]


def _names(languages: Iterable[str]) -> dict[str, str]:
    """Return the tag of a code block -> its language."""
    return {tag: name for name in languages for tag in (name, *LANGUAGES[name].tags)}


def _language(tag: str, names: Mapping[str, str]) -> str | None:
    """Return the language of a tag, which may include a version."""
    return names.get(tag) or names.get(tag.rstrip("0123456789"))


def _is_python(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def job_for(test: Test, answer: Answer) -> Job:
    """Return the program that runs a test on an answer."""
    if isinstance(test, StdioTest):
        expected = test.expected
        source = with_imports(answer.source, before=_RECURSION) if answer.language == "python" else answer.source
        return Job(answer.language, source, test.stdin.encode(), lambda end: same_output(_text(end), expected))
    if isinstance(test, CallTest):
        result, code = test.expected, with_imports(answer.source, frozenset({test.function}))
        request = {"code": code, "function": test.function, "arguments": harness.encode(test.arguments)}
        return _harnessed(request, lambda end: _same_result(end.stdout, result))
    code = with_imports(_complete(test.prompt, answer.source), frozenset(test.functions.values()))
    proof = secrets.token_hex(16)
    check: dict[str, object] = {"code": code, "tests": test.tests, "functions": test.functions, "proof": proof}
    return _harnessed(check, lambda end: end.stdout.endswith(proof.encode()))


def _complete(prompt: str, source: str) -> str:
    """Append an answer to the code that it completes; future imports are moved to the beginning."""
    return "\n".join([*_FUTURE.findall(source), prompt, _FUTURE.sub("", source)])


def _harnessed(request: dict[str, object], passed: Callable[[Finished], bool]) -> Job:
    return Job("python", _HARNESS, json.dumps(request).encode(), passed)


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have the same words in the same lines, with a tolerance of 1e-6 for decimal numbers.

    Spaces around words and empty lines are ignored.
    """
    printed_lines, expected_lines = (list(filter(str.strip, text.splitlines())) for text in (printed, expected))
    return len(printed_lines) == len(expected_lines) and all(map(_same_words, printed_lines, expected_lines))


def _same_words(printed_line: str, expected_line: str) -> bool:
    printed, expected = printed_line.split(), expected_line.split()
    return len(printed) == len(expected) and all(
        word == target or _is_close(word, target) for word, target in zip(printed, expected, strict=True)
    )


def _is_close(printed: str, expected: str) -> bool:
    if not {".", "e", "E"} & set(printed + expected):
        return False  # integers must be equal
    try:
        if expected.lstrip("-").isdecimal():
            return float(printed).is_integer() and int(float(printed)) == int(expected)
        return math.isclose(float(printed), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _same_result(stdout: bytes, expected: object) -> bool:
    """Return whether a call returned the expected result; tuples equal lists, and APPS wraps some results in a list."""
    try:
        if _is_larger(stdout, json.dumps(harness.encode(expected))):
            return False
        result = _as_json(json.loads(stdout))
        return _equal(result, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0])
        )
    except Exception:  # noqa: BLE001 - invalid output of an answer is a wrong result, not an error of the row
        return False


def _is_larger(stdout: bytes, expected: str) -> bool:
    """Return whether a result is too large to equal the expected one, in which case it is not parsed."""
    # An equal result has as many commas, plus one per complex number; its numbers may be longer.
    return stdout.count(b",") > 1 + 2 * expected.count(",") or len(stdout) > 1000 + 50 * len(expected)


def _as_json(value: object) -> object:
    """Convert the result of a call to the types of JSON. Keys are strings, because hashes of numbers can collide."""
    if isinstance(value, list):
        return list(map(_as_json, value))
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": items}:
            return list(map(_as_json, items))
        case {"dict": pairs}:
            return {_key_text(_key(key)): _as_json(item) for key, item in pairs}
        case {"int": digits}:
            return int(digits, 16)
        case {"complex": components}:
            return complex(*components)
    raise ValueError("no value of JSON is equal to it")


def _key_text(key: object) -> str:
    """Return a key as JSON writes it."""
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
        except OverflowError:  # an integer that exceeds all floats
            return False
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_equal, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_equal(result[key], expected[key]) for key in expected)
    return bool(result == expected)


def _text(end: Finished) -> str:
    return end.stdout.decode(errors="replace")
