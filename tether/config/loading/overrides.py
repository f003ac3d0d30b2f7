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
        return Problem(f"{text[:40]}...", "is nested too deeply to be read", "write it flatter")
    if not override.key_or_group:
        return Problem(text, "names no key", "an override is key=value")
    if override.package is not None:
        return Problem(text, "names a package with @, which only Hydra's config groups have", "write key=value")
    if override.is_sweep_override():
        return Problem(text, "asks for several runs", "give one value; a list is written [a,b]")
    return Override(override.key_or_group, override.value(), override.is_delete())


def _how_to_write(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and value and re.fullmatch(r"[+~]*\w+([.]\w+)*", key):
        return f"""quote the value, inside quotes for the shell: '{key}="{value}"'"""
    return "an override is key=value, +key=value, ++key=value or ~key"
