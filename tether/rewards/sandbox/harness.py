"""The program beside an answer that is called: it runs as text in the sandbox, and imports nothing of tether.

Standard input holds a JSON object: ``code``, and ``function`` and ``arguments`` of a call, or ``tests``, a program in
which the names of ``functions`` stand for functions of the code. The first prints the result; the second prints
``proof`` if `tests` runs through. There the code is in a process of its own, which sees neither the tests nor the
proof; an exit code alone could come from any process that the code gets hold of.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import subprocess
import sys
from typing import Any, Dict, TextIO  # noqa: UP035 - older interpreters run this, too

MODULES = "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys"
PRELUDE = f"""
{MODULES}
from collections import Counter, OrderedDict, defaultdict, deque
from functools import lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, comb, floor, gcd, inf, sqrt
from typing import *
"""
_KINDS = (("tuple", tuple), ("set", (set, frozenset)))


def encode(value: object, depth: int = 0) -> object:
    """Plain data as JSON, with the kinds that it cannot hold; of any other object only its class, by name."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if depth > 100:
        return {"other": "nested too deeply"}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    for name, kind in _KINDS:
        if isinstance(value, kind):
            return {name: [encode(item, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]}
    if hasattr(value, "shape") and hasattr(value, "tolist"):  # NumPy
        return encode(value.tolist(), depth + 1)
    return {"other": type(value).__name__}


def decode(value: object) -> Any:
    """Read what `encode` made; an object of another class is equal to nothing."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(decode(item) for item in items)
    if kind == "set":
        return {decode(item) for item in items}
    return {decode(key): decode(item) for key, item in items} if kind == "dict" else object()


def load(code: str) -> Dict[str, Any]:  # noqa: UP006
    """The names that the code defines."""
    names = {"__name__": "answer"}
    exec(PRELUDE, names)
    exec(compile(code, "answer.py", "exec"), names)
    return names


def find(names: Dict[str, Any], function: str) -> Any:  # noqa: UP006
    """A function of the code, or a method of its class Solution."""
    return names[function] if function in names else getattr(names["Solution"](), function.rpartition(".")[2])


def private_output() -> TextIO:
    """Standard output for the harness alone: what the code prints goes to standard error."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def serve() -> None:
    """Be the process of the code: the first line is the code, each further one a call."""
    output = private_output()
    names = load(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        function, arguments, keywords = json.loads(line)
        try:
            answer: object = [encode(find(names, function)(*decode(arguments), **decode(keywords)))]
        except Exception as error:  # noqa: BLE001 - the tests may expect it
            answer = type(error).__name__
        print(json.dumps(answer), file=output, flush=True)


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

    def call(self, function: str, *arguments: object, **keywords: object) -> Any:
        """The result of the function; an exception is raised under its name."""
        self._send([function, encode(arguments), encode(keywords)])
        assert self._other.stdout
        answer = json.loads(self._other.stdout.readline())
        if isinstance(answer, str):
            known: Any = getattr(builtins, answer, None)
            is_exception = isinstance(known, type) and issubclass(known, Exception)
            raise known(answer) if is_exception else RuntimeError(answer)
        return decode(answer[0])

    def _send(self, request: object) -> None:
        assert self._other.stdin
        self._other.stdin.write(json.dumps(request) + "\n")
        self._other.stdin.flush()

    def close(self) -> None:
        """End the process of the code."""
        self._other.kill()
        self._other.wait()


def check(code: str, tests: str, functions: Dict[str, str], proof: str) -> None:  # noqa: UP006
    """Run the tests, and print the proof; what they call is answered by the process of the code."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process may look into this one
    answers = Answers(code)
    names: Dict[str, Any] = {"__name__": "tests"}  # noqa: UP006
    exec(MODULES, names)
    for name, function in functions.items():
        names[name] = lambda *arguments, function=function, **keywords: answers.call(function, *arguments, **keywords)
    exec(compile(tests, "tests.py", "exec"), names)
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
    sys.setrecursionlimit(20000)
    serve() if sys.argv[1:] == ["serve"] else main()
