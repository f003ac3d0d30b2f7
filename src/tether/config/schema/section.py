"""The building blocks of the schema: the base class, the marks on a field and the named types."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of keys. Values must have exactly the field's type (a float may be written as 1)."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,  # only the complete tree is ever validated, so no section needs its own validator
    )


@dataclass(frozen=True)
class Inherits:
    """Marks a key that inherits another key's value while it is unset or null."""

    key: str
    """Dotted key; with a leading dot, relative to the same section."""
    equals: object = None
    """If set, the inherited value is the boolean whether that key equals it."""


@dataclass(frozen=True)
class AliasOf:
    """Marks an alias of a key. Loading moves its value to that key, so that it is always null in a loaded config."""

    key: str
    """Dotted key, as in `Inherits`."""


@dataclass(frozen=True)
class NullIsUnset:
    """Marks a key whose default is not null, but where null means the default, as in verl."""


@dataclass(frozen=True)
class ActsIf:
    """Marks a key, or all keys of a section, that only have an effect while another key has certain values.

    A key's own mark takes precedence over that of its section. Exactly one of `on` and `off` is set.
    """

    key: str
    """Dotted key, as in `Inherits`."""
    on: tuple[object, ...] | None = None
    """Values of that key with which the marked keys have an effect."""
    off: tuple[object, ...] | None = None
    """Values of that key with which the marked keys have no effect."""
    other: ActsIf | None = None
    """Alternative switch, which is sufficient by itself."""
    also: ActsIf | None = None
    """Additional switch, which must be on as well."""
    own_function: bool = True
    """Whether a user's own function also switches the keys on, since its signature names what it reads."""


@dataclass(frozen=True)
class EmbodiedToo:
    """Marks a key, or all keys of a section, that both embodied and text runs read."""


@dataclass(frozen=True)
class Refuses:
    """Marks choices that are valid in verl but refused here."""

    choices: tuple[str, ...]
    why: str


EMBODIED = ActsIf("env.train.id", off=(None,))
"""Marks keys that only embodied runs read."""
EMBODIED_TOO = EmbodiedToo()


@dataclass(frozen=True)
class Says:
    """The description of a type in error messages and `tether config explain`."""

    text: str


def _as_text(value: object) -> object:
    # A name such as $(date +%Y%m%d) expands to digits and is parsed as a number.
    return str(value) if type(value) is int else value


def _off(value: object) -> object:
    return 0 if value is False else value


def _printable(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError("empty, or not one line of text")
    return value


def _as_day(value: str) -> str:
    return date.fromisoformat(value).isoformat()


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def as_strings(value: object) -> object:
    """Return one name or a list of names as a tuple; a list may also be a quoted string."""
    # Shells and launchers turn lists into strings such as '["console","wandb"]' and "['a.parquet']".
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError("not a list") from error
    return (value,) if isinstance(value, str) else _as_tuple(value)


Name = Annotated[str, BeforeValidator(_as_text), AfterValidator(_printable), Says("a name: one line, not empty")]
OwnFunction = Annotated[str, Field(pattern=r"^.+\.py:\w+$"), Says("a function of a file: FILE.py:NAME")]
Day = Annotated[str, AfterValidator(_as_day), Says("a date, YYYY-MM-DD")]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_strings), Says("a string or a list of strings")]
Floats = Annotated[tuple[float, ...], BeforeValidator(_as_tuple), Says("a list of numbers")]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple), Says("a list of two numbers, from 0 to below 1")]
Seed = Annotated[int, Field(ge=0, lt=2**63), Says("a whole number from 0 to 2**63 - 1")]
Options = Annotated[dict[str, object], Field(default_factory=dict), Says("a {key: value} mapping")]
Positive = Annotated[int, Field(gt=0), Says("a whole number above 0")]
Count = Annotated[int, Field(ge=0), Says("a whole number, 0 or above")]
Steps = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple), Says("a list of whole numbers above 0")]
Saves = Annotated[int, Field(ge=-1), BeforeValidator(_off), Says("a whole number (-1: at the end alone, 0: never)")]
OffOrEvery = Annotated[int, Field(ge=-1), BeforeValidator(_off), Says("a whole number (-1 or 0: off)")]
Limit = Annotated[int, Field(ge=-1), Says("a whole number (-1: no limit)")]
PositiveFloat = Annotated[float, Field(gt=0), Says("a number above 0")]
Range = Annotated[
    tuple[PositiveFloat, PositiveFloat], BeforeValidator(_as_tuple), Says("a list of two numbers above 0")
]
NonNegative = Annotated[float, Field(ge=0), Says("a number, 0 or above")]
Fraction = Annotated[float, Field(ge=0, le=1), Says("a number from 0 to 1")]
PositiveFraction = Annotated[float, Field(gt=0, le=1), Says("a number above 0, at most 1")]
AboveOne = Annotated[float, Field(gt=1), Says("a number above 1")]
