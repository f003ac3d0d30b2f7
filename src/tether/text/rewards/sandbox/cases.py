"""Parsing of the tests of a row, in the layouts of public datasets of programming problems."""

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

from tether.runtime.digits import MAX_DIGITS, has_too_many_digits, many_digits
from tether.text.rewards.sandbox.harness import MAX_NESTING, MODULES
from tether.text.rewards.sandbox.imports import names_of

_LAYOUTS = (
    "{inputs, outputs} with an optional fn_name (APPS, TACO, verl's code rows), a list of {input, output, testtype} "
    "or LiveCodeBench's columns, {prompt, test, entry_point} (HumanEval), or assert_case or test_list"
)
_MAX_UNPACKED = 256 << 20  # bytes
_IGNORED_OPCODES = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")  # around the text in a pickle
_MAX_OPCODES = 6  # in a pickled text
_JSON_TYPES = (str, int, float, type(None), list, dict)


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
    """A test program that calls functions of the answer and raises if they are wrong."""

    tests: str
    functions: dict[str, str] = field(default_factory=dict)
    """Name in `tests` -> function of the answer."""
    prompt: str = ""
    """Code before the answer."""


Item = TypeVar("Item")
Test: TypeAlias = StdioTest | CallTest | AssertTest


def parse_tests(ground_truth: object) -> list[Test]:
    """Parse the tests of a row.

    Raises:
        ValueError: the layout is unknown, there is no test, or the tests are invalid.
    """
    try:
        with many_digits():
            return _parsed(_json(ground_truth, "ground_truth"))
    except ValueError as error:
        if has_too_many_digits(error):
            raise ValueError(f"the tests of the row have an integer of more than {MAX_DIGITS:,} digits") from error
        raise
    except (TypeError, AttributeError, LookupError, OverflowError, RecursionError, MemoryError) as error:
        # A list instead of a mapping, infinitely nested tests, and so on.
        raise ValueError(f"the tests of the row cannot be read ({error}). Give {_LAYOUTS}") from error


def refuse_converted(ground_truth: object, tests: Iterable[Test]) -> None:
    """Refuse tests that storage in columns may have changed, because a right answer would fail them.

    A column has one type (Parquet, `datasets`). Its mappings have the keys of all rows, with null for missing ones, and
    its integers become floats if another row has floats.

    Args:
        ground_truth: ground truth of a row from columns; text is stored unchanged.
        tests: result of `parse_tests`.

    Raises:
        ValueError: there is such a mapping or number; the message says how to store it.
    """
    if isinstance(ground_truth, str):
        return
    advice = "so the original value is unknown. Store ground_truth as a JSON text."
    for index, test in enumerate(tests):
        arguments, expected = (test.arguments, test.expected) if isinstance(test, CallTest) else (None, None)
        for what, value in ((f"input {index}", arguments), (f"output {index}", expected)):
            if (key := _null_key(value)) is not None:
                raise ValueError(
                    f"{what} has a mapping with null for {key!r:.80}. A column of Parquet or `datasets` adds the keys "
                    f"of other rows' mappings, {advice}"
                )
    inner = ground_truth.get("input_output") or ground_truth if isinstance(ground_truth, dict) else None
    numbers = [inner.get("inputs"), inner.get("outputs")] if isinstance(inner, dict) else []  # others store texts
    if (number := _integral_float(numbers)) is not None:
        raise ValueError(
            f"the tests have {number!r} as a decimal number. A column of Parquet or `datasets` converts integers to "
            f"decimal numbers if other tests have these, {advice}"
        )


def _integral_float(value: object) -> float | None:
    """Find a float that is an integer, at any depth."""
    return next((item for item in _walk(value) if isinstance(item, float) and item.is_integer()), None)


def _null_key(value: object) -> object:
    """Find a key whose value is null, at any depth."""
    mappings = (item for item in _walk(value) if isinstance(item, dict))
    return next((key for mapping in mappings for key, item in mapping.items() if item is None), None)


def _walk(value: object) -> Iterator[object]:
    """Yield a value and all items in it, at any depth."""
    level = [value]
    while level:
        yield from level
        level = _items(level)


def _parsed(truth: Any) -> list[Test]:
    if isinstance(truth, dict):  # in a column, keys that only rows of another layout have are null
        truth = {key: value for key, value in truth.items() if value is not None}
    match truth:
        case {"input_output": inner}:
            return parse_tests(inner)
        case {"test": str(test), "entry_point": str(function), "prompt": str(prompt)}:
            _refuse_idle(test, "test")
            tests = f"{prompt}\n{_compiled(test, 'test')}\ncheck(candidate)\n"
            return [AssertTest(_compiled(tests, "prompt"), {"candidate": function}, prompt)]
        case {"assert_case": list(asserts)} | {"test_list": list(asserts)} if asserts:
            setup = "\n".join(_lines(truth, "test_imports") + _lines(truth, "test_setup_code"))
            return [_assertion(line, setup, index) for index, line in enumerate(asserts)]
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            return _pairs(inputs, outputs, truth.get("fn_name"))
        case {"public_test_cases": public}:
            metadata = _json(truth.get("metadata") or "{}", "metadata")
            listed = _listed(public, "public_test_cases") + _listed(
                truth.get("private_test_cases"), "private_test_cases"
            )
            return [_listed_test(item, metadata, index) for index, item in enumerate(_not_empty(listed))]
        case [dict(), *_]:
            return [_listed_test(item, {}, index) for index, item in enumerate(truth)]
    keys = sorted(truth) if isinstance(truth, dict) else type(truth).__name__
    raise ValueError(f"the tests (reward_model.ground_truth) have no known layout: {keys}. Give {_LAYOUTS}")


def _lines(truth: dict[str, Any], key: str) -> list[str]:
    """Return lines of code before the assertions, stored as a text or a list."""
    value = truth.get(key) or []
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{key} of the row is {str(value)[:80]!r}, not a text or a list of lines")
    return lines


def _pairs(inputs: list[object], outputs: list[object], function: object) -> list[Test]:
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; each test needs both")
    pairs = _not_empty(list(zip(inputs, outputs, strict=True)))
    if function is None:
        return [
            StdioTest(_text(stdin, f"input {index}"), _text(expected, f"output {index}"))
            for index, (stdin, expected) in enumerate(pairs)
        ]
    if not isinstance(function, str) or not function:
        raise ValueError(f"fn_name is {function!r}, not the name of a function")
    return [_call(function, arguments, expected, index) for index, (arguments, expected) in enumerate(pairs)]


def _listed_test(item: Any, metadata: Any, index: int) -> Test:
    """Parse a test of LiveCodeBench."""
    match item:
        case {"input": str(text), "output": str(expected)}:
            options = {**metadata, **(item.get("metadata") or {})}
            function = options.get("func_name") or options.get("fn_name")
            if (item.get("testtype") or "stdin") == "stdin":
                return StdioTest(_text(text, f"input {index}"), _text(expected, f"output {index}"))
            if not isinstance(function, str):
                raise ValueError(
                    f"test {index} is functional, but its function is missing: add "
                    '"metadata": {"func_name": NAME} to the test, or, next to public_test_cases, a column `metadata` '
                    'with {"func_name": NAME} to the row'
                )
            return _call(function, text, expected, index)
    raise ValueError(f"test {index} is {str(item)[:80]!r}, not {{input, output, testtype}} with texts")


def _call(function: str, arguments: object, expected: object, index: int) -> CallTest:
    """Parse a call. Arguments and result are values, or JSON texts with one argument per line."""
    if isinstance(arguments, str):
        arguments = [_json(line, f"input {index}") for line in arguments.splitlines() if line.strip()]
        if isinstance(expected, str):
            with contextlib.suppress(json.JSONDecodeError, RecursionError):  # the result may be plain text
                expected = json.loads(expected)
    if not isinstance(arguments, list):
        raise ValueError(f"input {index} is {str(arguments)[:80]!r}, not a list of arguments")
    _check_value(arguments, f"input {index}")
    _check_value(expected, f"output {index}")
    return CallTest(function, [_with_integer_keys(argument) for argument in arguments], expected)


def _check_value(value: object, what: str) -> None:
    """Check that a value consists of types of JSON, and is not nested too deeply."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        for item in level:
            keys = [key for key in item if not isinstance(key, str)] if isinstance(item, dict) else []
            for wrong in keys if isinstance(item, _JSON_TYPES) else [item]:
                raise ValueError(
                    f"{what} has {wrong!r:.80} of the type {type(wrong).__name__}"
                    f"{' as a key' * bool(keys)}, which JSON does not have. Write JSON, or assertions (test_list)."
                )
        level = _items(level)
    if any(isinstance(item, list | dict) for item in level):
        raise ValueError(f"{what} is nested more than {MAX_NESTING} levels deep, which is the limit")


def _items(values: Iterable[object]) -> list[object]:
    """Return the items of all lists and mappings among these values."""
    items = (value.values() if isinstance(value, dict) else value for value in values if isinstance(value, list | dict))
    return list(chain.from_iterable(items))


def _with_integer_keys(value: object) -> object:
    """Convert the keys of a JSON object to integers if all are integers, because JSON has only text as keys."""
    # Longer keys stay text, because integers of that size can be chosen to collide as hashes.
    if isinstance(value, dict) and value and all(len(key) < 19 and key.removeprefix("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _assertion(line: object, setup: str, index: int) -> AssertTest:
    what = f"assertion {index}"
    if not isinstance(line, str):
        raise ValueError(f"{what} is {line!r:.80}, not a text")
    _refuse_idle(line, what)
    tests = f"{setup}\n{line}"
    tree = ast.parse(_compiled(tests, what))
    names = names_of(tree)
    bound = names.bound | names.methods | set(MODULES)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    # If only builtins are called, the answer defines a function with that name: MBPP asks for a `sum`.
    functions = names.read - bound - set(dir(builtins)) or called - bound
    if not functions:
        raise ValueError(f"{what} uses no function of the answer, so every answer has the same result: {line[:80]!r}")
    return AssertTest(tests, {name: name for name in sorted(functions)})


def _refuse_idle(tests: str, what: str) -> None:
    """Raise ValueError if tests are not Python, or no answer could fail them."""
    tree = ast.parse(_compiled(tests, what))
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError(f"{what} of the row asserts nothing, so every answer would pass: {tests[:80]!r}")


def _compiled(source: str, what: str) -> str:
    try:
        compile(source, what, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} of the row is not valid Python: {error}") from error
    return source


def _listed(value: object, what: str) -> list[object]:
    """Parse a list, its JSON, or LiveCodeBench's packed form: base64 of zlib of a pickled JSON text."""
    if isinstance(value, str):
        value = _json(value if value.lstrip().startswith("[") else _unpacked(value, what), what)
    if value is None or isinstance(value, list):
        return value or []
    raise ValueError(f"{what} is {type(value).__name__}, not a list of tests")


def _unpacked(value: str, what: str) -> str:
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(base64.b64decode(value, validate=True), _MAX_UNPACKED + 1)
        if len(content) > _MAX_UNPACKED:
            raise ValueError(f"{what} is packed and unpacks to more than {_MAX_UNPACKED >> 20} MiB")
        if not unpacking.eof:
            raise EOFError("it is truncated")
        return _pickled_text(content)
    except (zlib.error, EOFError, pickle.UnpicklingError, binascii.Error) as error:
        raise ValueError(f"{what} is neither JSON nor LiveCodeBench's packed form: {error}") from error


def _pickled_text(content: bytes) -> str:
    """Return the text in a pickle that contains nothing else, without executing the pickle."""
    try:
        opcodes = [(opcode.name, value) for opcode, value, _ in islice(pickletools.genops(content), _MAX_OPCODES)]
    except (ValueError, OverflowError) as error:
        raise pickle.UnpicklingError(f"it is not a pickle ({error})") from error
    match [opcode for opcode in opcodes if opcode[0] not in _IGNORED_OPCODES]:
        case [(name, str(text)), ("STOP", None)] if "UNICODE" in name:
            return text
    raise pickle.UnpicklingError("it is not a pickle of a text")


def _json(value: object, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON ({error}): {value[:80]!r}. Give {_LAYOUTS}") from error


def _not_empty(tests: list[Item]) -> list[Item]:
    if not tests:
        raise ValueError("the row has no test, so every answer would pass")
    return tests


def _text(value: object, what: str) -> str:
    """Convert a text, a number, or a list of lines to text."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError(f"{what} is {str(value)[:80]!r}, not a text or its lines; other values need fn_name")
    text = "\n".join(map(str, lines))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise ValueError(f"{what} has an unpaired surrogate ({surrogate!a}), which is not valid Unicode") from error
    return text
