"""Names of the standard library that a Python program uses without importing them.

On LeetCode they are there, and so they are in the harnesses of APPS, LiveCodeBench and verl, which import whole modules
into every answer. Here a program gets those that it uses: it has no function that it does not name.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import warnings
from functools import cache, lru_cache
from typing import NamedTuple

_ALL_OF = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
"""Modules whose names are known; of a name that several have, the last counts, and modules come before all."""
_MODULES = (*_ALL_OF, "time", "fractions")


@lru_cache(maxsize=8)  # a program is put to each test of its row
def with_imports(source: str, asked: frozenset[str] = frozenset(), *, before: str = "") -> str:
    """A program, behind imports of what it uses without having it; as it is where it is no Python.

    Args:
        source: the program.
        asked: functions that it has to define itself.
        before: code that runs first.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
        found = names_of(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    known, has = _known(), found.bound | set(dir(builtins)) | (asked - found.methods)
    lines = [*before.splitlines(), *(known[name] for name in sorted(found.read - has) if name in known)]
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    first = future[-1].end_lineno or 0 if future else 0
    rest = source.split("\n")
    return "\n".join([*rest[:first], *lines, *rest[first:]])


class Names(NamedTuple):
    """Names in a program."""

    read: set[str]
    bound: set[str]
    """Those that get a value somewhere, but for methods."""
    methods: set[str]


def names_of(tree: ast.AST) -> Names:
    """The names in a program."""
    found = Names(set(), set(), set())
    methods: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                found.read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(name=name, asname=None):
                found.bound.add(name.split(".")[0])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                (found.methods if node in methods else found.bound).add(name)
            case ast.ClassDef(name=name, body=body):
                found.bound.add(name)
                methods.update(body)
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchMapping(rest=str(name)):
                found.bound.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.bound.add(name)
    return found


@cache
def _known() -> dict[str, str]:
    """Name -> the line that imports it."""
    found: dict[str, str] = {}
    for module in _ALL_OF:
        names = vars(importlib.import_module(module))
        public = names.get("__all__") or [name for name in names if not name.startswith("_")]
        found.update((name, f"from {module} import {name}") for name in public)
    return found | {module: f"import {module}" for module in _MODULES}
