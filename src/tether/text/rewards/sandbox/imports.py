"""Imports of standard library names that a Python program uses without importing them.

LeetCode and the harnesses of APPS, LiveCodeBench and verl import entire modules into every answer. Here a program gets
only the names that it uses, so that no other name can hide a missing definition.
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
"""Modules whose names are imported. If several have the same name, the last one wins; a module's own name takes
precedence over all names in modules."""
_MODULES = (*_ALL_OF, "time", "fractions")


@lru_cache(maxsize=8)  # a program is run once per test of its row
def with_imports(source: str, required: frozenset[str] = frozenset(), *, before: str = "") -> str:
    """Add imports of undefined names to a program; source that is not Python is returned unchanged.

    Args:
        source: the program.
        required: functions that the program itself must define.
        before: code that runs before the program.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
        names = names_of(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    imports, defined = _import_lines(), names.bound | set(dir(builtins)) | (required - names.methods)
    added = [*before.splitlines(), *(imports[name] for name in sorted(names.read - defined) if name in imports)]
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    position = future[-1].end_lineno or 0 if future else 0
    lines = source.split("\n")
    return "\n".join([*lines[:position], *added, *lines[position:]])


class Names(NamedTuple):
    """Names in a program."""

    read: set[str]
    bound: set[str]
    """Names that are assigned or defined anywhere, except methods."""
    methods: set[str]


def names_of(tree: ast.AST) -> Names:
    """Collect the names in a program."""
    names = Names(set(), set(), set())
    methods: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                names.read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(name=name, asname=None):
                names.bound.add(name.split(".")[0])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                (names.methods if node in methods else names.bound).add(name)
            case ast.ClassDef(name=name, body=body):
                names.bound.add(name)
                methods.update(body)
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchMapping(rest=str(name)):
                names.bound.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.bound.add(name)
    return names


@cache
def _import_lines() -> dict[str, str]:
    """Return name -> the line that imports it."""
    imports: dict[str, str] = {}
    for module in _ALL_OF:
        names = vars(importlib.import_module(module))
        public = names.get("__all__") or [name for name in names if not name.startswith("_")]
        imports.update((name, f"from {module} import {name}") for name in public)
    return imports | {module: f"import {module}" for module in _MODULES}
