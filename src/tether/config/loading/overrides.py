"""Overrides in Hydra's grammar: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from tether.config.problems import Problem

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser


_MAX_DEPTH = 100
"""Maximum nesting of lists and mappings in a value; OmegaConf does not support much more."""


@dataclass(frozen=True)
class Override:
    """One parsed override; the prefixes `+` and `++` have no effect, because the schema defines all keys."""

    path: str
    value: object
    delete: bool
    """Whether it resets the key to its default, like `~a.b`; with a value, only if the key has that value."""


def parse_overrides(overrides: Sequence[str | Override]) -> tuple[list[Override], list[Problem]]:
    """Parse each override separately, so that all problems are reported; parsed overrides are returned unchanged."""
    parsed = [_parse(override) if isinstance(override, str) else override for override in overrides]
    return (
        [item for item in parsed if isinstance(item, Override)],
        [item for item in parsed if isinstance(item, Problem)],
    )


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser  # slow to import

    return OverridesParser.create()


@lru_cache(maxsize=4096)  # Hydra's parser takes a millisecond, and a command parses its overrides several times
def _parse(text: str) -> Override | Problem:
    from hydra.errors import HydraException

    try:
        override = _parser().parse_override(text)
    except HydraException as error:
        return Problem(text.strip() or repr(text), f"cannot be read ({str(error).splitlines()[0]})", _syntax_hint(text))
    except RecursionError:
        return _too_deep(text)
    except ValueError as error:  # for example an integer with thousands of digits
        return Problem(_key(text), f"cannot be read ({error})", "give another number")
    if not override.key_or_group:
        return Problem(text, "names no key", "an override is key=value")
    if override.package is not None:
        what = "names a package with @, which only Hydra's config groups have"
        choice = text.lstrip("+~").replace("=", ": ", 1)
        return Problem(text, what, f"write key=value, or `- override {choice}` last in the file's defaults list")
    if override.is_sweep_override():
        return Problem(text, "asks for several runs", "give one value; a list is written [a,b]")
    if "\0" in text:  # a NUL character would truncate a path
        return Problem(_key(text), "holds a NUL character", "take it out")
    value = override.value()
    if _depth(value) > _MAX_DEPTH:
        return _too_deep(text)
    return Override(override.key_or_group, value, override.is_delete())


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _too_deep(text: str) -> Problem:
    return Problem(_key(text)[:40], "is nested too deeply to be read", "write it flatter")


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _syntax_hint(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and value and re.fullmatch(r"[+~]*\w+([.]\w+)*", key):
        escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # Hydra only unescapes a backslash before a quote
        quoted = shlex.quote(key + '="' + escaped + '"')
        return f"quote the value, inside quotes for the shell: {quoted}"
    return "an override is key=value, +key=value, ++key=value or ~key"
