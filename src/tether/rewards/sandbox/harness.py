"""The program beside an answer that is called: it runs as text in the sandbox, and imports nothing of tether.

Standard input holds a JSON object: ``code``, and ``function`` and ``arguments`` of a call, or ``tests``, a program in
which the names of ``functions`` stand for functions and classes of the code. The first prints the result; the second
prints ``proof`` if `tests` runs through. There the code is in a process of its own, which sees neither the tests nor
the proof; an exit code alone could come from any process that the code gets hold of.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import operator
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, TextIO

_IMPORTS = "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys"
MODULES = _IMPORTS[len("import ") :].split(", ")
MOST_NESTED = 100  # lists around a value
MOST_CALLS = 50_000  # within each other, as in LiveCodeBench
_PLAIN_BITS = 4096  # of whole numbers that JSON may hold: some readers refuse thousands of digits
_VALUES = {"builtins.range", "fractions.Fraction", "decimal.Decimal", *(f"datetime.{name}" for name in (
    "date", "datetime", "time", "timedelta", "timezone"))}  # fmt: skip
_KINDS: Any = (("tuple", tuple), ("set", set), ("frozenset", frozenset))
_OPERATIONS: dict[str, Callable[..., object]] = {
    "getattr": getattr, "setattr": setattr, "iter": iter, "next": next, "len": len, "bool": bool, "str": str,
    "getitem": operator.getitem, "setitem": operator.setitem, "contains": operator.contains,
}  # fmt: skip


class Held:
    """An object in the process of the code, seen from the tests: all that they do with it is done there.

    It is equal to nothing else, whatever its own class says.
    """

    answers: Answers
    number: int

    def __init__(self, answers: Answers, number: int) -> None:
        self.__dict__.update(answers=answers, number=number)

    def __getattr__(self, name: str) -> object:
        return self.answers.ask("getattr", self, name)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        """Call it there."""
        return self.answers.call(self, *arguments, **keywords)


def _forward(operation: str) -> None:
    setattr(Held, f"__{operation}__", lambda self, *arguments: self.answers.ask(operation, self, *arguments))


for _operation in set(_OPERATIONS) - {"getattr"}:
    _forward(_operation)


def encode(value: object, depth: int = 0, held: list[object] | None = None) -> object:
    """Plain data as JSON, with the kinds that it cannot hold; of any other object only its class, by name.

    Args:
        value: the data.
        depth: of the lists around it.
        held: takes up other objects, which are encoded as their place in it.
    """
    if value is None or isinstance(value, bool):
        return value
    for plain in (float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() < _PLAIN_BITS else {"int": hex(number)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Held):
        return {"held": value.number}
    if depth > MOST_NESTED:
        return {"other": "nested too deeply"}
    if isinstance(value, list):
        return [encode(item, depth + 1, held) for item in value]
    for name, kind in _KINDS:
        if isinstance(value, kind):
            return {name: [encode(item, depth + 1, held) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(key, depth + 1, held), encode(item, depth + 1, held)] for key, item in value.items()]
        return {"dict": pairs}
    if hasattr(value, "shape") and hasattr(value, "tolist"):  # NumPy
        return encode(value.tolist(), depth + 1, held)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _VALUES:
        return {"value": [name, encode(list(value.__reduce__()[1]), depth + 1, held)]}
    if held is None:
        return {"other": type(value).__name__}
    held.append(value)
    return {"held": len(held) - 1}


def decode(value: object, held: Any = None) -> Any:
    """Read what `encode` made; an object of another class is equal to nothing.

    Args:
        value: what it made.
        held: gives the object of a place.
    """
    if isinstance(value, list):
        return [decode(item, held) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(decode(item, held) for item in items)
    if kind in ("set", "frozenset"):
        return (set if kind == "set" else frozenset)(decode(item, held) for item in items)
    if kind == "dict":
        return {decode(key, held): decode(item, held) for key, item in items}
    if kind == "int":
        return int(items, 16)
    if kind == "value" and held and items[0] in _VALUES:  # where time is limited: a fraction may take long
        module, _, name = items[0].rpartition(".")
        return getattr(importlib.import_module(module), name)(*decode(items[1], held))
    if kind == "bytes":
        return bytes.fromhex(items)
    if kind == "complex":
        return complex(*items)
    return held(items) if kind == "held" and held else object()


def load(code: str) -> dict[str, Any]:
    """The names that the code defines."""
    return execute(code, "answer", "", {})


def execute(code: str, name: str, prelude: str, known: dict[str, Any]) -> dict[str, Any]:
    """Run code as a module, where dataclasses look for its classes, and without the future imports of this file."""
    module = sys.modules[name] = types.ModuleType(name)
    names = module.__dict__
    exec(prelude, names)
    names.update(known)
    exec(compile(code, f"{name}.py", "exec", dont_inherit=True), names)
    return names


def find(names: dict[str, Any], function: str) -> Any:
    """A function of the code, or a method of its class Solution, where both are there the method, as on LeetCode."""
    method = function.rpartition(".")[2]
    if function not in names or hasattr(names.get("Solution"), method):
        return getattr(names["Solution"](), method)
    return names[function]


def private_output() -> TextIO:
    """Standard output for the harness alone: what the code prints goes to standard error."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def serve() -> None:
    """Be the process of the code: the first line is the code, each further one a request."""
    output = private_output()
    names = load(json.loads(sys.stdin.readline()))
    held: list[object] = []
    for line in sys.stdin:
        operation, *rest = json.loads(line)
        arguments, keywords = decode(rest, held.__getitem__)
        function = _OPERATIONS.get(operation) or arguments.pop(0)
        if isinstance(function, str):
            function = find(names, function)
        try:
            result = function(*arguments, **keywords)
            answer: object = [encode(result, 0, held), encode(arguments, 0, held)]
        except Exception as error:  # noqa: BLE001 - the tests may expect it
            answer = {"raised": encode(_builtin(error), 0, held)}
        print(json.dumps(answer), file=output, flush=True)


def _builtin(error: Exception) -> list[object]:
    """The first class of an exception that the tests know, too, and the arguments that give it its text."""
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins":
            with contextlib.suppress(Exception):
                if str(kind(*error.args)) == str(error):
                    return [kind.__name__, list(error.args)]
            with contextlib.suppress(Exception):
                kind(text := str(error))
                return [kind.__name__, [text]]
    return ["Exception", []]


class Answers:
    """The functions of the code, seen from the tests."""

    def __init__(self, code: str) -> None:
        self._other = subprocess.Popen(
            [sys.executable, "-I", __file__, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(code)

    def call(self, function: object, *arguments: object, **keywords: object) -> object:
        """The result of a function; what it does to lists, dictionaries and sets is done to `arguments`, too."""
        result, after = self._ask("", (function, *arguments), keywords)
        for mine, theirs in zip(arguments, after):  # noqa: B905 - older interpreters
            if isinstance(mine, list) and isinstance(theirs, list):
                mine[:] = theirs
            elif isinstance(mine, (dict, set)) and type(mine) is type(theirs) and mine != theirs:
                mine.clear()
                mine.update(theirs)
        return result

    def ask(self, operation: str, *arguments: object) -> object:
        """The result of one of the operations."""
        return self._ask(operation, arguments, {})[0]

    def _ask(self, operation: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> Any:
        """The result, and the arguments as they are now; an exception is raised under its builtin class.

        A process that is gone, or says something else, ends the tests: they could expect whatever is raised.
        """
        self._send([operation, encode(list(arguments)), encode(keywords)])
        try:
            found = self._received()
        except Exception:  # noqa: BLE001 - what an answer writes can fail in any way
            os._exit(1)
        if isinstance(found, StopIteration) and operation != "next":  # would end a loop around the call
            raise RuntimeError("the function raised StopIteration")
        if isinstance(found, Exception):
            raise found
        return found

    def _received(self) -> Any:
        assert self._other.stdout
        answer = json.loads(self._other.stdout.readline())
        if isinstance(answer, dict):
            name, arguments = decode(answer["raised"], self._held)
            kind: Any = getattr(builtins, name)
            if issubclass(kind, Exception):
                return kind(*arguments)
            raise TypeError(name)
        result, after = decode(answer, self._held)
        return result, list(after)

    def _held(self, number: int) -> Held:
        return Held(self, number)

    def _send(self, request: object) -> None:
        assert self._other.stdin
        text = json.dumps(request) + "\n"
        try:
            self._other.stdin.write(text)
            self._other.stdin.flush()
        except OSError:
            os._exit(1)

    def close(self) -> None:
        """End the process of the code."""
        self._other.kill()
        self._other.wait()


def check(code: str, tests: str, functions: dict[str, str], proof: str) -> None:
    """Run the tests, and print the proof; what they call is answered by the process of the code."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process may look into this one
    answers = Answers(code)
    known = {
        name: lambda *arguments, function=function, **keywords: answers.call(function, *arguments, **keywords)
        for name, function in functions.items()
    }
    execute(tests, "tests", _IMPORTS, known)
    answers.close()
    sys.stdout.flush()
    os.write(1, ("\n" + proof).encode())


def main() -> None:
    """Do what standard input asks for."""
    request = json.loads(sys.stdin.read())
    if "tests" in request:
        return check(request["code"], request["tests"], request["functions"], request["proof"])
    output = private_output()
    result = find(load(request["code"]), request["function"])(*decode(request["arguments"]))
    print(json.dumps(encode(result)), file=output, flush=True)
    return None


if __name__ == "__main__":
    sys.setrecursionlimit(MOST_CALLS)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    serve() if sys.argv[1:] == ["serve"] else main()
