"""Reads one YAML file as plain nested data."""

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
"""OmegaConf's mark of a missing value."""


MAX_VALUES = 100_000
"""Maximum number of values in a file, counted with its aliases expanded."""


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader; the one of libyaml, if the wheel includes it, is ten times as fast."""

_TOO_DEEP = "is nested too deeply to be read", "write it flatter"

_RAY_PREFIX = re.compile(r"^(?:\x1b\[\d+m)?\(\w+ pid=\d+[^)]*\)(?:\x1b\[0m)? ", re.MULTILINE)
"""Prefix that Ray adds to each line printed by another process."""


def read_yaml(path: Path, others: Iterable[str] = ()) -> dict[Any, Any]:
    """Read a file of keys, or the Python dict that verl prints at its start; interpolations are kept as `${...}`.

    Args:
        path: path of the file.
        others: names without suffix to suggest if the file is missing, in addition to the files in its folder.

    Raises:
        ConfigError: the file cannot be read, or has no keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree: object = _parse_printed(text)
        if tree is None:
            _check_size(yaml.compose(text, Loader=_Loader))
            tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except RecursionError as error:
        raise ConfigError([Problem(str(path), *_TOO_DEEP)]) from error
    except OSError as error:
        fix = "give a YAML file"
        if isinstance(error, FileNotFoundError):
            names = [file.name for file in path.parent.glob("*.y*ml")]
            suggestions = closest(path.name, [*names, *(f"{name}.yaml" for name in others)], cutoff=0.8)
            fix = f"did you mean {path.with_name(suggestions[0])}?" if suggestions else fix
        raise ConfigError([Problem(str(path), f"cannot be read ({error.strerror or error})", fix)]) from error
    except (
        YAMLError,
        OmegaConfBaseException,
        ValueError,
    ) as error:  # ValueError: not UTF-8, or an integer with too many digits
        if "maximum nesting depth" in str(error):  # libyaml's own limit
            raise ConfigError([Problem(str(path), *_TOO_DEEP)]) from error
        what = f"cannot be read as YAML ({' '.join(str(error).split())})"
        raise ConfigError([Problem(str(path), what, "correct that line")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), "holds a list, not keys", "write key: value lines")])
    return tree


def _parse_printed(text: str) -> dict[Any, Any] | None:
    """Parse a dict written by `pprint`, in which YAML would read None as a string; return None if it is not one."""
    text = _RAY_PREFIX.sub("", text).strip()
    if not text.startswith("{"):
        return None
    try:
        tree = ast.literal_eval(_Numbers().visit(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return None
    return tree if isinstance(tree, dict) else None


class _Numbers(ast.NodeTransformer):
    """Replaces the names `inf` and `nan` by numbers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _check_size(root: yaml.Node | None) -> None:
    """Check the number of values of a file with its aliases expanded; aliases may also be recursive."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            if isinstance(node.value, str) and "\0" in node.value:  # a NUL character would truncate a path
                raise YAMLError(f"line {node.start_mark.line + 1} holds a NUL character")
            sizes[id(node)] = MAX_VALUES  # counted for references to the node from within itself
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            children = [child for item in inner for child in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + sum(map(size, children))
        return sizes[id(node)]

    if root is not None and size(root) > MAX_VALUES:
        raise YAMLError(f"its aliases stand for more than {MAX_VALUES} values, or contain themselves")
