"""Kinds of rows in the tables of RLinf keys, and the conversions that rows name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

Values = Mapping[str, Any]
"""Key -> value for all keys of a file, with interpolations resolved."""
Convert = Callable[[Any, Values], Any]
"""(value of the key, all values) -> value of the native keys, or UNSET; raises `Unsupported` or `NotRead`."""

Default = TypeVar("Default", int, None)

UNSET: Final[object] = object()
"""The native key is not set and keeps its default."""


class Unsupported(Exception):
    """A value without a counterpart in tether; its message is the reason.

    Attributes:
        key: the key with the problem, if it is not the one that is being converted.
        fix: the fix; by default to leave it out.
    """

    def __init__(self, why: str, key: str | None = None, fix: str = "leave it out") -> None:
        super().__init__(why)
        self.key = key
        self.fix = fix


class NotRead(Exception):
    """A key that RLinf itself ignores in a file; the message names the key that it reads instead."""


def same(value: object, values: Values) -> object:
    """Return the value unchanged."""
    return value


@dataclass(frozen=True)
class Mapped:
    """The key has native counterparts."""

    to: Mapping[str, Convert]
    """Native key -> conversion of the value."""
    default: object = UNSET
    """RLinf's default if a file lacks the key; UNSET: the native default."""


def to(*keys: str, by: Convert = same, default: object = UNSET) -> Mapped:
    """Return the row of a key whose native counterparts all get the same value."""
    return Mapped(dict.fromkeys(keys, by), default)


@dataclass(frozen=True)
class NoEffect:
    """The key may have any value: it has no counterpart here, or does not affect the result of training."""

    why: str


@dataclass(frozen=True)
class Refused:
    """The key is not supported; values in `fine` are accepted, because they have no effect."""

    why: str
    fine: tuple[object, ...] = (None,)


@dataclass(frozen=True)
class Checked:
    """The key is read by the importer itself."""

    why: str


Row: TypeAlias = Mapped | NoEffect | Refused | Checked
Table = Mapping[str, Row]
"""Key, or pattern of keys -> row. A key's own row takes precedence over patterns, and earlier patterns over later ones.

A row `a.b.*` applies to the complete section if the table has no other row below `a.b`.
"""


def choice(names: Mapping[str, object], why: str) -> Convert:
    """Return the conversion of names by a table."""

    def convert(value: object, values: Values) -> object:
        if not isinstance(value, str) or value not in names:
            raise Unsupported(f"{why} (supported: {', '.join(names)})")
        return names[value]

    return convert


def unless_null(value: object, values: Values) -> object:
    """Return the value, or UNSET for null."""
    return UNSET if value is None else value


def only(fine: tuple[object, ...], why: str) -> Convert:
    """Return the conversion that accepts some values unchanged and refuses all others."""

    def convert(value: object, values: Values) -> object:
        if value not in fine:
            raise Unsupported(why)
        return value

    return convert


def positive_int(values: Values, key: str, default: Default) -> int | Default:
    """Return an integer above 0 from the file, or the default if the key is missing or null.

    Raises:
        Unsupported: any other value.
    """
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise Unsupported("it is not a whole number above 0", key)
    return value


PRECISIONS: Mapping[object, str] = {
    "bf16": "bfloat16", "bf16-mixed": "bfloat16", "bfloat16": "bfloat16",
    32: "float32", "32": "float32", "fp32": "float32", "32-true": "float32", "float32": "float32",
}  # fmt: skip
NO_PRECISION = (None, "null")
"""RLinf's values for "no dtype is configured"."""


def precision(value: object, values: Values) -> object:
    """Return a dtype; UNSET for null."""
    if value in NO_PRECISION:
        return UNSET
    if value not in PRECISIONS:
        raise Unsupported("number formats are bf16 and fp32")
    return PRECISIONS[value]


def path(value: object, values: Values) -> object:
    """Return a path without a trailing slash."""
    return value.rstrip("/") or value if isinstance(value, str) else value


def betas(section: str) -> Convert:
    """Return the conversion of AdamW's betas, which are two keys of `section` in RLinf."""
    return lambda value, values: [values.get(f"{section}.adam_beta1", 0.9), values.get(f"{section}.adam_beta2", 0.999)]


def min_lr_ratio(optim: str) -> Convert:
    """Return the conversion of the minimum learning rate to a share of the peak rate in section `optim`."""

    def convert(value: Any, values: Values) -> object:
        peak = values.get(f"{optim}.lr")
        return float(value) / float(peak) if value and peak else UNSET

    return convert


def adapter_rank(role: str) -> Convert:
    """Return the conversion of the flag that enables LoRA adapters of `role` to their rank, which is a separate key."""
    return lambda value, values: positive_int(values, f"{role}.model.lora_rank", 32) if value else 0


def steps_or_off(value: object, values: Values) -> object:
    """Return an interval in steps; -1 for any negative number, with which RLinf disables it."""
    return -1 if isinstance(value, int) and value < 0 else value


LOSSES = {"actor": "vanilla", "actor_critic": "vanilla", "decoupled_actor_critic": "decoupled"}
