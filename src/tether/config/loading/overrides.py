"""Overrides in Hydra's grammar: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tether.config.problems import Problem

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser


_MOST_LEVELS = 100
"""Lists and mappings within one another that a value may have: OmegaConf reads hardly more."""


@dataclass(frozen=True)
class Override:
    """One parsed override. `+` and `++` mean the same as none of them: the schema knows which keys there are."""

    path: str
    value: object
    delete: bool
    """`~a.b`: back to the default. With a value, only if the key has it, as in Hydra."""


def parse_overrides(given: Sequence[str | Override]) -> tuple[list[Override], list[Problem]]:
    """Parse each text by itself, so that one bad override does not hide another; parsed ones stay as they are."""
    parsed = [_parse(one) if isinstance(one, str) else one for one in given]
    return (
        [item for item in parsed if isinstance(item, Override)],
        [item for item in parsed if isinstance(item, Problem)],
    )


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser  # slow to import

    return OverridesParser.create()


def _parse(text: str) -> Override | Problem:
    from hydra.errors import HydraException

    try:
        override = _parser().parse_override(text)
    except HydraException as error:
        return Problem(
            text.strip() or repr(text), f"cannot be read ({str(error).splitlines()[0]})", _how_to_write(text)
        )
    except RecursionError:
        return _too_deep(text)
    except ValueError as error:  # a number of thousands of digits
        return Problem(_key(text), f"cannot be read ({error})", "give another number")
    if not override.key_or_group:
        return Problem(text, "names no key", "an override is key=value")
    if override.package is not None:
        what = "names a package with @, which only Hydra's config groups have"
        choice = text.lstrip("+~").replace("=", ": ", 1)
        return Problem(text, what, f"write key=value, or `- override {choice}` last in the file's defaults list")
    if override.is_sweep_override():
        return Problem(text, "asks for several runs", "give one value; a list is written [a,b]")
    if "\0" in text:  # which ends a path for the system
        return Problem(_key(text), "holds a NUL character", "take it out")
    value = override.value()
    if _depth(value) > _MOST_LEVELS:
        return _too_deep(text)
    return Override(override.key_or_group, value, override.is_delete())


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _too_deep(text: str) -> Problem:
    return Problem(_key(text)[:40], "is nested too deeply to be read", "write it flatter")


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _how_to_write(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and value and re.fullmatch(r"[+~]*\w+([.]\w+)*", key):
        return f"""quote the value, inside quotes for the shell: '{key}="{value}"'"""
    return "an override is key=value, +key=value, ++key=value or ~key"
