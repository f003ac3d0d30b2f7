"""The schema as a flat table of keys with their types, defaults, docs and marks."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import pairwise
from operator import getitem
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tether.config.schema.root import RunConfig
from tether.config.schema.section import (
    EMBODIED,
    ActsIf,
    AliasOf,
    EmbodiedToo,
    Inherits,
    NullIsUnset,
    Refuses,
    Says,
    Section,
)
from tether.config.secrets import masked

Mark = TypeVar("Mark")
PLAIN_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a {key: value} mapping",
    list: "a list",
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: str
    section: type[Section]
    """The class that defines the field."""
    type_text: str
    """Description of the type, including "or null" if it may be null."""
    default: object
    """Default; None for a key that is required or inherits."""
    required: bool
    example: str | None
    choices: tuple[str, ...]
    """Choices, if the type is a choice of names."""
    inherits: Inherits | None
    """The inherited key, as an absolute key; None if it does not inherit."""
    alias_of: str | None
    """The absolute key of which this one is an alias."""
    is_mapping: bool
    """Whether the value is a mapping with free names."""
    null_is_unset: bool
    """Whether null means that the key is unset."""
    acts_if: ActsIf | None
    """Conditions under which the key acts, with absolute keys; None if it always acts."""
    in_embodied: bool
    """Whether embodied runs read the key."""
    refuses: Refuses | None
    """Choices of verl that tether refuses."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the choices that are not refused; empty if the type is not a choice of names."""
        refused = self.refuses.choices if self.refuses else ()
        return tuple(choice for choice in self.choices if choice not in refused)

    @property
    def doc(self) -> str:
        """Return the docstring of the field."""
        return field_docs(self.section)[self.path.rpartition(".")[2]]


@cache
def keys() -> dict[str, Key]:
    """Return every key by its dotted path, in the order of the schema."""
    return {path: _key(path, section, field, above) for path, section, field, above in _fields("", RunConfig, ())}


@cache
def sections() -> dict[str, str]:
    """Return the doc of every section by its dotted path."""
    return dict(_sections("", RunConfig))


@cache
def field_docs(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of a section's fields by name."""
    # Parsed from the source on demand, because pydantic's `use_attribute_docstrings` would parse it at every start.
    docs: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, Section):
            (tree,) = ast.parse(inspect.getsource(kind)).body
            assert isinstance(tree, ast.ClassDef)
            for statement, below in pairwise(tree.body):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = inspect.cleandoc(text)
    return docs


def values_of(config: RunConfig) -> dict[str, Any]:
    """Return the config as a flat table: dotted key -> value."""
    return {path: reduce(getattr, path.split("."), config) for path in keys()}


def with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Return a copy of the config with new values: dotted key -> value."""
    tree = config.model_dump()
    for path, value in values.items():
        *sections, name = path.split(".")
        reduce(getitem, sections, tree)[name] = value
    return RunConfig.model_validate(tree)


def mapping_key(path: str) -> str | None:
    """Return the key of the free mapping that contains `path`, for example `data.apply_chat_template_kwargs`."""
    names = path.split(".")
    prefixes = (".".join(names[:count]) for count in range(1, len(names)))
    return next((prefix for prefix in prefixes if prefix in keys() and keys()[prefix].is_mapping), None)


def show(value: object) -> str:
    """Return a value as text, as in YAML or in an override, without its secrets."""
    value = masked(value)
    if isinstance(value, list):
        return "[" + ",".join(show(item) for item in value) + "]"
    return "null" if value is None else str(value)


def _fields(
    prefix: str, section: type[Section], above: tuple[object, ...]
) -> Iterator[tuple[str, type[Section], FieldInfo, tuple[object, ...]]]:
    """Yield every field with its path, its section, and the marks of its enclosing sections, innermost first."""
    for name, field in section.model_fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type)
            yield from _fields(f"{prefix}{name}.", field.annotation, (*field.metadata, *above))
        else:
            yield prefix + name, section, field, above


def _sections(prefix: str, section: type[Section]) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type)
            yield prefix + name, (field.annotation.__doc__ or "").strip()
            yield from _sections(f"{prefix}{name}.", field.annotation)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _key(path: str, section: type[Section], field: FieldInfo, above: tuple[object, ...]) -> Key:
    inherits, alias = _mark(Inherits, field.metadata), _mark(AliasOf, field.metadata)
    marks = (*field.metadata, *above)
    return Key(
        path=path,
        section=section,
        type_text=type_text(field.annotation, field.metadata),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        required=field.is_required() and inherits is None,
        example=field.examples[0] if field.examples else None,
        choices=_choices(field.annotation),
        inherits=Inherits(_absolute(path, inherits.key), inherits.equals) if inherits else None,
        alias_of=_absolute(path, alias.key) if alias else None,
        is_mapping=_is_mapping(field.annotation),
        null_is_unset=inherits is not None or _mark(NullIsUnset, field.metadata) is not None,
        acts_if=_switch(path, _mark(ActsIf, marks)),
        in_embodied=EMBODIED in marks or _mark(EmbodiedToo, marks) is not None,
        refuses=_mark(Refuses, field.metadata),
    )


def _switch(path: str, mark: ActsIf | None) -> ActsIf | None:
    """Return the mark with absolute keys, or None for the key that itself switches its section."""
    if mark is None or _absolute(path, mark.key) == path:
        return None
    other, also = _switch(path, mark.other), _switch(path, mark.also)
    return replace(mark, key=_absolute(path, mark.key), other=other, also=also)


def _mark(kind: type[Mark], metadata: Iterable[object]) -> Mark | None:
    return next((mark for mark in metadata if isinstance(mark, kind)), None)


def _absolute(path: str, key: str) -> str:
    """Resolve a key that is written relative to the section of `path`."""
    if not key.startswith("."):
        return key
    return path.rsplit(".", 1)[0] + key


def _is_mapping(annotation: object) -> bool:
    return get_origin(annotation) is dict or any(_is_mapping(argument) for argument in get_args(annotation))


def _choices(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for argument in get_args(annotation) for choice in _choices(argument))


def type_text(annotation: Any, metadata: list[object]) -> str:
    """Return the description of a type, from its `Says` mark or its structure."""
    says = _mark(Says, metadata)
    origin = get_origin(annotation)
    if says is not None:
        return says.text
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return type_text(inner, marks)
    if origin is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if origin is tuple:
        return "one or more of " + ", ".join(_choices(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(argument, []) for argument in get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    return PLAIN_WORDS[origin or annotation]
