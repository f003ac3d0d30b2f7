"""The tests of a row, in the layouts of the public sets of programming problems."""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import contextlib
import json
import pickle
import pickletools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar

from tether.rewards.sandbox.harness import MODULES, MOST_NESTED
from tether.rewards.sandbox.imports import names_of
from tether.runtime.digits import MAX_DIGITS, has_too_many_digits, many_digits

_LAYOUTS = (
    "{inputs, outputs} with an optional fn_name (APPS, TACO, verl's code rows), a list of {input, output, testtype} "
    "or LiveCodeBench's columns, {prompt, test, entry_point} (HumanEval), or assert_case or test_list"
)
_MOST_UNPACKED = 256 << 20  # bytes
_AROUND_A_TEXT = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")
_STEPS_OF_A_TEXT = 6
_JSON = (str, int, float, type(None), list, dict)


@dataclass(frozen=True)
class StdioTest:
    """The program reads `stdin` and prints `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A function of the program, or a method of its class Solution, returns `expected`."""

    function: str
    arguments: list[object]
    expected: object


@dataclass(frozen=True)
class AssertTest:
    """A program of the data that calls functions of the answer and raises where they are wrong."""

    tests: str
    functions: dict[str, str] = field(default_factory=dict)
    """Name in `tests` -> function of the answer."""
    prompt: str = ""
    """Code that stands before the answer."""


One = TypeVar("One")
Test: TypeAlias = StdioTest | CallTest | AssertTest


def parse_tests(ground_truth: object) -> list[Test]:
    """Read the tests of a row.

    Raises:
        ValueError: no known layout, no test, or tests that cannot be read.
    """
    try:
        with many_digits():
            return _parsed(_json(ground_truth, "ground_truth"))
    except ValueError as error:
        if has_too_many_digits(error):
            raise ValueError(f"the tests of the row have a whole number of more than {MAX_DIGITS:,} digits") from error
        raise
    except (TypeError, AttributeError, LookupError, OverflowError, RecursionError, MemoryError) as error:
        # A list where keys belong, tests within tests without end, and the like.
        raise ValueError(f"the tests of the row cannot be read ({error}). Give {_LAYOUTS}") from error


def refuse_filled(ground_truth: object, tests: Iterable[Test]) -> None:
    """Refuse tests that columns may have changed: a right answer would fail them.

    A column has one type (Parquet, `datasets`). Its mappings have the keys of all rows, and null where one was written
    without a key; its whole numbers are decimal ones where another row has these.

    Args:
        ground_truth: of a row that was read from columns. A text is as it was written.
        tests: what `parse_tests` made of it.

    Raises:
        ValueError: the first such mapping or number, and how to write it.
    """
    if isinstance(ground_truth, str):
        return
    advice = "so what was written is unknown. Write ground_truth as a text of JSON."
    for number, test in enumerate(tests):
        given, expected = (test.arguments, test.expected) if isinstance(test, CallTest) else (None, None)
        for what, value in ((f"input {number}", given), (f"output {number}", expected)):
            if (key := _null_key(value)) is not None:
                raise ValueError(
                    f"{what} has a mapping with null for {key!r:.80}. A column of Parquet or `datasets` adds each key "
                    f"of other rows' mappings, {advice}"
                )
    inner = ground_truth.get("input_output") or ground_truth if isinstance(ground_truth, dict) else None
    numbers = [inner.get("inputs"), inner.get("outputs")] if isinstance(inner, dict) else []  # others give texts
    if (whole := _whole_decimal(numbers)) is not None:
        raise ValueError(
            f"the tests have {whole!r} as a decimal number. A column of Parquet or `datasets` makes decimal numbers of "
            f"whole ones where other tests have decimals, {advice}"
        )


def _whole_decimal(value: object) -> float | None:
    """A decimal number that is whole, at any depth."""
    return next((item for item in _within(value) if isinstance(item, float) and item.is_integer()), None)


def _null_key(value: object) -> object:
    """A key whose value is null, at any depth, or None."""
    mappings = (item for item in _within(value) if isinstance(item, dict))
    return next((key for mapping in mappings for key, item in mapping.items() if item is None), None)


def _within(value: object) -> Iterator[object]:
    """A value, and all that it holds at any depth."""
    level = [value]
    while level:
        yield from level
        level = _one_deeper(level)


def _parsed(found: Any) -> list[Test]:
    if isinstance(found, dict):  # keys that only rows of another layout have are null in a column
        found = {key: value for key, value in found.items() if value is not None}
    match found:
        case {"input_output": inner}:
            return parse_tests(inner)
        case {"test": str(test), "entry_point": str(function), "prompt": str(prompt)}:
            _refuse_idle(test, "test")
            tests = f"{prompt}\n{_compiled(test, 'test')}\ncheck(candidate)\n"
            return [AssertTest(_compiled(tests, "prompt"), {"candidate": function}, prompt)]
        case {"assert_case": list(asserts)} | {"test_list": list(asserts)} if asserts:
            setup = "\n".join(_lines(found, "test_imports") + _lines(found, "test_setup_code"))
            return [_assertion(line, setup, number) for number, line in enumerate(asserts)]
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            return _pairs(inputs, outputs, found.get("fn_name"))
        case {"public_test_cases": public}:
            metadata = _json(found.get("metadata") or "{}", "metadata")
            listed = _listed(public, "public_test_cases") + _listed(
                found.get("private_test_cases"), "private_test_cases"
            )
            return [_listed_test(item, metadata, number) for number, item in enumerate(_some(listed))]
        case [dict(), *_]:
            return [_listed_test(item, {}, number) for number, item in enumerate(found)]
    keys = sorted(found) if isinstance(found, dict) else type(found).__name__
    raise ValueError(f"the tests (reward_model.ground_truth) have no known layout: {keys}. Give {_LAYOUTS}")


def _lines(found: dict[str, Any], key: str) -> list[str]:
    """Lines of code that stand before assertions: a text, or a list of them."""
    value = found.get(key) or []
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{key} of the row is {str(value)[:80]!r}, not a text or a list of lines")
    return lines


def _pairs(inputs: list[object], outputs: list[object], function: object) -> list[Test]:
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; each test needs both")
    pairs = _some(list(zip(inputs, outputs, strict=True)))
    if function is None:
        return [
            StdioTest(_text(given, f"input {number}"), _text(expected, f"output {number}"))
            for number, (given, expected) in enumerate(pairs)
        ]
    if not isinstance(function, str) or not function:
        raise ValueError(f"fn_name is {function!r}, which names no function")
    return [_call(function, given, expected, number) for number, (given, expected) in enumerate(pairs)]


def _listed_test(item: Any, metadata: Any, number: int) -> Test:
    """A test of LiveCodeBench."""
    match item:
        case {"input": str(given), "output": str(expected)}:
            known = {**metadata, **(item.get("metadata") or {})}
            function = known.get("func_name") or known.get("fn_name")
            if (item.get("testtype") or "stdin") == "stdin":
                return StdioTest(_text(given, f"input {number}"), _text(expected, f"output {number}"))
            if not isinstance(function, str):
                raise ValueError(
                    f"test {number} is functional, and no function is named: give it "
                    '"metadata": {"func_name": NAME}, or, beside public_test_cases, the row a column `metadata` with '
                    '{"func_name": NAME}'
                )
            return _call(function, given, expected, number)
    raise ValueError(f"test {number} is {str(item)[:80]!r}, not {{input, output, testtype}} with texts")


def _call(function: str, given: object, expected: object, number: int) -> CallTest:
    """A call: arguments and result are values, or text: the JSON of an argument on each line, and of the result."""
    if isinstance(given, str):
        given = [_json(line, f"input {number}") for line in given.splitlines() if line.strip()]
        if isinstance(expected, str):
            with contextlib.suppress(json.JSONDecodeError, RecursionError):  # a plain text
                expected = json.loads(expected)
    if not isinstance(given, list):
        raise ValueError(f"input {number} is {str(given)[:80]!r}, not a list of arguments")
    _refuse_unfit(given, f"input {number}")
    _refuse_unfit(expected, f"output {number}")
    return CallTest(function, [_with_numbers(argument) for argument in given], expected)


def _refuse_unfit(value: object, what: str) -> None:
    """Raise ValueError where a value is none of JSON, or nested deeper than it can travel."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        for item in level:
            keys = [key for key in item if not isinstance(key, str)] if isinstance(item, dict) else []
            for wrong in keys if isinstance(item, _JSON) else [item]:
                raise ValueError(
                    f"{what} has {wrong!r:.80} of the type {type(wrong).__name__}"
                    f"{' as a key' * bool(keys)}, which JSON does not have. Write JSON, or assertions (test_list)."
                )
        level = _one_deeper(level)
    if any(isinstance(item, list | dict) for item in level):
        raise ValueError(f"{what} is nested more than {MOST_NESTED} deep, which no answer can be given or return")


def _one_deeper(values: Iterable[object]) -> list[object]:
    """The items of those values that are lists or mappings."""
    held = (value.values() if isinstance(value, dict) else value for value in values if isinstance(value, list | dict))
    return list(chain.from_iterable(held))


def _with_numbers(value: object) -> object:
    """Keys of JSON objects are texts; those that are whole numbers were numbers.

    Longer ones stay texts: the hashes of such numbers can be made to collide.
    """
    if isinstance(value, dict) and value and all(len(key) < 19 and key.removeprefix("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _assertion(line: object, setup: str, number: int) -> AssertTest:
    what = f"assertion {number}"
    if not isinstance(line, str):
        raise ValueError(f"{what} is {line!r:.80}, not a text")
    _refuse_idle(line, what)
    tests = f"{setup}\n{line}"
    tree = ast.parse(_compiled(tests, what))
    found = names_of(tree)
    bound = found.bound | found.methods | set(MODULES)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    # Where nothing but builtins is called, the answer defines a function of such a name: MBPP asks for a `sum`.
    asked = found.read - bound - set(dir(builtins)) or called - bound
    if not asked:
        raise ValueError(f"{what} uses nothing of the answer, so it is the same for every one: {line[:80]!r}")
    return AssertTest(tests, {name: name for name in sorted(asked)})


def _refuse_idle(tests: str, what: str) -> None:
    """Raise ValueError where tests are no Python, or do nothing that an answer could fail."""
    tree = ast.parse(_compiled(tests, what))
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError(f"{what} of the row asserts nothing, so every answer would be right: {tests[:80]!r}")


def _compiled(source: str, what: str) -> str:
    try:
        compile(source, what, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} of the row is no Python: {error}") from error
    return source


def _listed(value: object, what: str) -> list[object]:
    """A list as it is, as JSON, or as LiveCodeBench packs it: base64 of zlib of a pickled text of JSON."""
    if isinstance(value, str):
        value = _json(value if value.lstrip().startswith("[") else _unpacked(value, what), what)
    if value is None or isinstance(value, list):
        return value or []
    raise ValueError(f"{what} is {type(value).__name__}, not a list of tests")


def _unpacked(value: str, what: str) -> str:
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(base64.b64decode(value, validate=True), _MOST_UNPACKED + 1)
        if len(content) > _MOST_UNPACKED:
            raise ValueError(f"{what} is packed and more than {_MOST_UNPACKED >> 20} MiB")
        if not unpacking.eof:
            raise EOFError("it is cut off")
        return _pickled_text(content)
    except (zlib.error, EOFError, pickle.UnpicklingError, binascii.Error) as error:
        raise ValueError(f"{what} is neither JSON nor LiveCodeBench's packed form: {error}") from error


def _pickled_text(content: bytes) -> str:
    """The text of a pickle that holds nothing else, read without running it."""
    try:
        steps = [(step.name, value) for step, value, _ in islice(pickletools.genops(content), _STEPS_OF_A_TEXT)]
    except (ValueError, OverflowError) as error:
        raise pickle.UnpicklingError(f"it is no pickle ({error})") from error
    match [step for step in steps if step[0] not in _AROUND_A_TEXT]:
        case [(name, str(text)), ("STOP", None)] if "UNICODE" in name:
            return text
    raise pickle.UnpicklingError("it is no pickle of a text")


def _json(value: object, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON ({error}): {value[:80]!r}. Give {_LAYOUTS}") from error


def _some(tests: list[One]) -> list[One]:
    if not tests:
        raise ValueError("the row has no test, so every answer would be right")
    return tests


def _text(value: object, what: str) -> str:
    """A text or number, or the lines of one."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError(f"{what} is {str(value)[:80]!r}, not a text or its lines; other values need fn_name")
    text = "\n".join(map(str, lines))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{what} has half a character ({half!a}), which no program can read or print") from error
    return text
