"""Forms of bash's ``${NAME...}`` that cut a value or replace a part of it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from tether.integrations.verl.arithmetic import NAME

CUT = re.compile(rf"(?P<name>{NAME}|[1-9]\d*)(?P<sign>##?|%%?|//?|,,|\^\^|:(?=\d))(?P<rest>.*)", re.DOTALL)
LENGTH = re.compile(rf"#({NAME})")
_LEFT_TO_BASH = re.compile(r"[\"'\\\[~&]|\$[({]")
"""Patterns and replacements with one of these are left to bash: quotes, sets of characters, other expansions."""
_REPLACED = re.compile(r"((?:[^/\\]|\\/)*)/?(.*)", re.DOTALL)
_PLACES = re.compile(r"(\d+)(?::(\d+))?")
_LONGEST = 10_000  # characters of a value that patterns are tried on


def cut(value: str, sign: str, rest: str, fill: Callable[[str], str | None]) -> str | None:
    """The value of ``${NAME##pattern}``, ``${NAME//pattern/text}``, ``${NAME,,}``, ``${NAME:1:2}`` or the like.

    Args:
        value: of the variable.
        sign: what is done.
        rest: the pattern, and what it is replaced by.
        fill: fills variables in; None: unknown.

    Returns:
        None where only bash could tell.
    """
    if not value.isascii() or len(value) > _LONGEST:  # letters and lengths depend on the locale
        return None
    if sign == ":":
        places = _PLACES.fullmatch(rest)
        return places and _part(value, int(places[1]), places[2])
    if sign in (",,", "^^"):
        return None if rest else value.lower() if sign == ",," else value.upper()
    written, by = rest, ""
    if sign in ("/", "//") and (parts := _REPLACED.fullmatch(rest)):
        written, by = parts[1].replace("\\/", "/"), parts[2]
    if _LEFT_TO_BASH.search(written) or _LEFT_TO_BASH.search(by):
        return None
    pattern, text = fill(written), fill(by)
    if pattern is None or text is None or _LEFT_TO_BASH.search(pattern) or _LEFT_TO_BASH.search(text):
        return None
    if sign in ("/", "//"):
        return _replaced(value, pattern, text, everywhere=sign == "//")
    matches = re.compile(fnmatch.translate(pattern)).match
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    at_begin = sign[0] == "#"
    for length in lengths:
        rest_begins = length if at_begin else len(value) - length
        begin, end = value[:rest_begins], value[rest_begins:]
        if matches(begin if at_begin else end):
            return end if at_begin else begin
    return value


def _part(value: str, begin: int, count: str | None) -> str:
    return value[begin:] if count is None else value[begin : begin + int(count)]


def _replaced(value: str, pattern: str, text: str, *, everywhere: bool) -> str | None:
    if pattern.startswith(("#", "%")) or not pattern.strip("*"):  # one end of the value; what matches nothing, too
        return None
    parts = {"*": ".*", "?": "."}
    matches = re.compile("".join(parts.get(char) or re.escape(char) for char in pattern), re.DOTALL)
    return matches.sub(lambda _: text, value, count=0 if everywhere else 1)
