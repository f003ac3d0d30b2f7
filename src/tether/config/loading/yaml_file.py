"""One YAML file as plain nested data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tether.config.problems import ConfigError, Problem
from tether.spelling import closest

MISSING = "???"
"""OmegaConf's word for a value that is still to be given."""


MOST_VALUES = 100_000
"""Values that a file may hold, with its aliases written out."""


_OF_RAY = re.compile(r"^(?:\x1b\[\d+m)?\(\w+ pid=\d+[^)]*\)(?:\x1b\[0m)? ", re.MULTILINE)
"""The prefix that Ray puts before each line of another process."""


def read_yaml(path: Path, others: Iterable[str] = ()) -> dict[Any, Any]:
    """Read a file of keys, or the dict of Python that verl prints at its start; interpolations stand as `${...}`.

    Args:
        path: of the file.
        others: names without a suffix that could have been given instead, beside those of files in its folder.

    Raises:
        ConfigError: it cannot be read, or holds no keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree: object = _printed(text)
        if tree is None:
            _check_size(yaml.compose(text, Loader=yaml.SafeLoader))
            tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except RecursionError as error:
        raise ConfigError([Problem(str(path), "is nested too deeply to be read", "write it flatter")]) from error
    except OSError as error:
        fix = "give a YAML file"
        if isinstance(error, FileNotFoundError):
            there = [file.name for file in path.parent.glob("*.y*ml")]
            meant = closest(path.name, [*there, *(f"{name}.yaml" for name in others)], cutoff=0.8)
            fix = f"did you mean {path.with_name(meant[0])}?" if meant else fix
        raise ConfigError([Problem(str(path), f"cannot be read ({error.strerror or error})", fix)]) from error
    except (YAMLError, OmegaConfBaseException, ValueError) as error:  # ValueError: no UTF-8, or too long a number
        what = f"cannot be read as YAML ({' '.join(str(error).split())})"
        raise ConfigError([Problem(str(path), what, "correct that line")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), "holds a list, not keys", "write key: value lines")])
    return tree


def _printed(text: str) -> dict[Any, Any] | None:
    """The tree of a text that is a dict as `pprint` writes it, whose None YAML would read as a word."""
    text = _OF_RAY.sub("", text).strip()
    if not text.startswith("{"):
        return None
    try:
        tree = ast.literal_eval(_Numbers().visit(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return None
    return tree if isinstance(tree, dict) else None


class _Numbers(ast.NodeTransformer):
    """Turns the names by which Python writes numbers that are not finite into them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """See `ast.NodeVisitor`."""
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _check_size(root: yaml.Node | None) -> None:
    """Count the values of a file, whose aliases may stand for any number of them, and for what they stand in.

    Raises:
        YAMLError: there are too many, or without end; or one holds a NUL character.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            if isinstance(node.value, str) and "\0" in node.value:  # which ends a path for the system
                raise YAMLError(f"line {node.start_mark.line + 1} holds a NUL character")
            sizes[id(node)] = MOST_VALUES  # of a node that is reached again from within itself
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    if root is not None and size(root) > MOST_VALUES:
        raise YAMLError(f"its aliases stand for more than {MOST_VALUES} values, or contain themselves")
