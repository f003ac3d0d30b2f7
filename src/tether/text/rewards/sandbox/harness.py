"""The program that calls the code of an answer. Its source is executed in the sandbox, so it does not import tether.

Standard input is a JSON object with ``code``, and either the ``function`` and ``arguments`` of a call, or ``tests``, a
program in which the names in ``functions`` stand for functions and classes of the code. For a call it prints the
result; for tests it prints ``proof`` if they succeed. The code of tests runs in a separate process, which sees neither
the tests nor the proof. An exit code would prove nothing, because the code may control any process that it can reach.
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
MAX_NESTING = 100  # lists around a value
MAX_RECURSION = 50_000  # as in LiveCodeBench
_MAX_PLAIN_BITS = 4096  # of integers in JSON, because some parsers refuse thousands of digits
_VALUES = {"builtins.range", "fractions.Fraction", "decimal.Decimal", *(f"datetime.{name}" for name in (
    "date", "datetime", "time", "timedelta", "timezone"))}  # fmt: skip
_KINDS: Any = (("tuple", tuple), ("set", set), ("frozenset", frozenset))
_OPERATIONS: dict[str, Callable[..., object]] = {
    "getattr": getattr, "setattr": setattr, "iter": iter, "next": next, "len": len, "bool": bool, "str": str,
    "getitem": operator.getitem, "setitem": operator.setitem, "contains": operator.contains,
}  # fmt: skip


class RemoteObject:
    """A proxy in the tests for an object in the process of the code, which executes all operations on it.

    It compares unequal to everything else, whatever its class defines.
    """

    code: CodeProcess
    index: int

    def __init__(self, code: CodeProcess, index: int) -> None:
        self.__dict__.update(code=code, index=index)

    def __getattr__(self, name: str) -> object:
        return self.code.operate("getattr", self, name)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        """Call the object in its process."""
        return self.code.call(self, *arguments, **keywords)


def _forward(operation: str) -> None:
    setattr(RemoteObject, f"__{operation}__", lambda self, *arguments: self.code.operate(operation, self, *arguments))


for _operation in set(_OPERATIONS) - {"getattr"}:
    _forward(_operation)


def encode(value: object, depth: int = 0, objects: list[object] | None = None) -> object:
    """Encode plain data as JSON, including types that JSON does not have.

    Args:
        value: the data.
        depth: number of lists around the value.
        objects: list to which other objects are appended; they are encoded as their index. None: only the names of
            their classes are encoded.
    """
    if value is None or isinstance(value, bool):
        return value
    for plain in (float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() < _MAX_PLAIN_BITS else {"int": hex(number)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, RemoteObject):
        return {"remote": value.index}
    if depth > MAX_NESTING:
        return {"other": "nested too deeply"}
    if isinstance(value, list):
        return [encode(item, depth + 1, objects) for item in value]
    for name, kind in _KINDS:
        if isinstance(value, kind):
            return {name: [encode(item, depth + 1, objects) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(key, depth + 1, objects), encode(item, depth + 1, objects)] for key, item in value.items()]
        return {"dict": pairs}
    if hasattr(value, "shape") and hasattr(value, "tolist"):  # NumPy
        return encode(value.tolist(), depth + 1, objects)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _VALUES:
        return {"value": [name, encode(list(value.__reduce__()[1]), depth + 1, objects)]}
    if objects is None:
        return {"other": type(value).__name__}
    objects.append(value)
    return {"remote": len(objects) - 1}


def decode(value: object, object_at: Any = None) -> Any:
    """Decode the result of `encode`; an object of another class compares unequal to everything."""
    if isinstance(value, list):
        return [decode(item, object_at) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(decode(item, object_at) for item in items)
    if kind in ("set", "frozenset"):
        return (set if kind == "set" else frozenset)(decode(item, object_at) for item in items)
    if kind == "dict":
        return {decode(key, object_at): decode(item, object_at) for key, item in items}
    if kind == "int":
        return int(items, 16)
    if kind == "value" and object_at and items[0] in _VALUES:  # only in a sandbox, because a fraction may take long
        module, _, name = items[0].rpartition(".")
        return getattr(importlib.import_module(module), name)(*decode(items[1], object_at))
    if kind == "bytes":
        return bytes.fromhex(items)
    if kind == "complex":
        return complex(*items)
    return object_at(items) if kind == "remote" and object_at else object()


def load(code: str) -> dict[str, Any]:
    """Execute the code of an answer and return the names that it defines."""
    return execute(code, "answer", "", {})


def execute(code: str, name: str, prelude: str, variables: dict[str, Any]) -> dict[str, Any]:
    """Execute code as a module, in which dataclasses look up its classes, and without this file's future imports."""
    module = sys.modules[name] = types.ModuleType(name)
    names = module.__dict__
    exec(prelude, names)
    names.update(variables)
    exec(compile(code, f"{name}.py", "exec", dont_inherit=True), names)
    return names


def find(names: dict[str, Any], function: str) -> Any:
    """Return a function of the code, or a method of its class Solution, which takes precedence, as on LeetCode."""
    method = function.rpartition(".")[2]
    if function not in names or hasattr(names.get("Solution"), method):
        return getattr(names["Solution"](), method)
    return names[function]


def private_output() -> TextIO:
    """Return stdout for the harness only, and redirect prints of the code to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def serve() -> None:
    """Run the process of the code: the first line of stdin is the code, each later one a request."""
    output = private_output()
    names = load(json.loads(sys.stdin.readline()))
    objects: list[object] = []
    for line in sys.stdin:
        operation, *encoded = json.loads(line)
        arguments, keywords = decode(encoded, objects.__getitem__)
        function = _OPERATIONS.get(operation) or arguments.pop(0)
        if isinstance(function, str):
            function = find(names, function)
        try:
            result = function(*arguments, **keywords)
            answer: object = [encode(result, 0, objects), encode(arguments, 0, objects)]
        except Exception as error:  # noqa: BLE001 - the tests may expect it
            answer = {"raised": encode(_builtin(error), 0, objects)}
        print(json.dumps(answer), file=output, flush=True)


def _builtin(error: Exception) -> list[object]:
    """Return the name of the first builtin class of an exception, with arguments that produce the same text."""
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins":
            with contextlib.suppress(Exception):
                if str(kind(*error.args)) == str(error):
                    return [kind.__name__, list(error.args)]
            with contextlib.suppress(Exception):
                kind(text := str(error))
                return [kind.__name__, [text]]
    return ["Exception", []]


class CodeProcess:
    """The process of the code; the tests call its functions."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._send(code)

    def call(self, function: object, *arguments: object, **keywords: object) -> object:
        """Call a function, apply its changes of lists, dictionaries and sets to `arguments`, and return the result."""
        result, after = self._request("", (function, *arguments), keywords)
        for mine, theirs in zip(arguments, after):  # noqa: B905 - older interpreters
            if isinstance(mine, list) and isinstance(theirs, list):
                mine[:] = theirs
            elif isinstance(mine, (dict, set)) and type(mine) is type(theirs) and mine != theirs:
                mine.clear()
                mine.update(theirs)
        return result

    def operate(self, operation: str, *arguments: object) -> object:
        return self._request(operation, arguments, {})[0]

    def _request(self, operation: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> Any:
        """Return the result and the changed arguments; an exception is raised as its builtin class."""
        self._send([operation, encode(list(arguments)), encode(keywords)])
        try:
            answer = self._receive()
        except Exception:  # noqa: BLE001 - the process is gone or wrote something else
            os._exit(1)  # raises nothing, because the tests may expect any exception
        if isinstance(answer, StopIteration) and operation != "next":  # it would end a loop around the call
            raise RuntimeError("the function raised StopIteration")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> Any:
        assert self._process.stdout
        answer = json.loads(self._process.stdout.readline())
        if isinstance(answer, dict):
            name, arguments = decode(answer["raised"], self._object_at)
            kind: Any = getattr(builtins, name)
            if issubclass(kind, Exception):
                return kind(*arguments)
            raise TypeError(name)
        result, after = decode(answer, self._object_at)
        return result, list(after)

    def _object_at(self, index: int) -> RemoteObject:
        return RemoteObject(self, index)

    def _send(self, request: object) -> None:
        assert self._process.stdin
        text = json.dumps(request) + "\n"
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except OSError:
            os._exit(1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def check(code: str, tests: str, functions: dict[str, str], proof: str) -> None:
    """Run the tests, which call functions in the process of the code, and print the proof if they succeed."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process can read the memory of this one
    process = CodeProcess(code)
    calls = {
        name: lambda *arguments, function=function, **keywords: process.call(function, *arguments, **keywords)
        for name, function in functions.items()
    }
    execute(tests, "tests", _IMPORTS, calls)
    process.close()
    sys.stdout.flush()
    os.write(1, ("\n" + proof).encode())


def main() -> None:
    """Execute the request on stdin."""
    request = json.loads(sys.stdin.read())
    if "tests" in request:
        return check(request["code"], request["tests"], request["functions"], request["proof"])
    output = private_output()
    result = find(load(request["code"]), request["function"])(*decode(request["arguments"]))
    print(json.dumps(encode(result)), file=output, flush=True)
    return None


if __name__ == "__main__":
    sys.setrecursionlimit(MAX_RECURSION)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    serve() if sys.argv[1:] == ["serve"] else main()
