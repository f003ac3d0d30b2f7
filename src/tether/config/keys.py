"""The schema as a flat table: every dotted key with its type, default, doc and marks."""

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
    """The class that has it as a field."""
    type_text: str
    """The type in words, with "or null" where it may be null."""
    default: object
    """None for a required key and for one that inherits."""
    required: bool
    example: str | None
    choices: tuple[str, ...]
    """Allowed names, where the type is a choice of names."""
    inherits: Inherits | None
    """With an absolute key."""
    alias_of: str | None
    """Absolute key that this one is a second name of."""
    is_mapping: bool
    """Any names may stand below it."""
    null_is_unset: bool
    """Null means the same as leaving the key out."""
    acts_if: ActsIf | None
    """Conditions that switch the key on, with absolute keys; None: it always acts."""
    in_embodied: bool
    """Embodied runs read it."""
    refuses: Refuses | None
    """Choices that verl has and tether refuses."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """The names that the key may take here; empty where it takes more than names."""
        refused = self.refuses.choices if self.refuses else ()
        return tuple(choice for choice in self.choices if choice not in refused)

    @property
    def doc(self) -> str:
        """The docstring of the field."""
        return field_docs(self.section)[self.path.rpartition(".")[2]]


@cache
def keys() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the schema."""
    return {path: _key(path, section, field, above) for path, section, field, above in _fields("", RunConfig, ())}


@cache
def sections() -> dict[str, str]:
    """Every section by its dotted path, with its doc."""
    return dict(_sections("", RunConfig))


@cache
def field_docs(section: type[Section]) -> dict[str, str]:
    """The docstrings below the fields of a section, by the names of the fields.

    Read out of the source when somebody asks; pydantic's `use_attribute_docstrings` would do so in every start.
    """
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
    """The config as a flat table: dotted key -> value."""
    return {path: reduce(getattr, path.split("."), config) for path in keys()}


def with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """The config with other values: dotted key -> value."""
    tree = config.model_dump()
    for path, value in values.items():
        *sections, name = path.split(".")
        reduce(getitem, sections, tree)[name] = value
    return RunConfig.model_validate(tree)


def show(value: object) -> str:
    """A value as one would write it in YAML or in an override, without its secrets."""
    value = masked(value)
    if isinstance(value, list):
        return "[" + ",".join(show(item) for item in value) + "]"
    return "null" if value is None else str(value)


def _fields(
    prefix: str, section: type[Section], above: tuple[object, ...]
) -> Iterator[tuple[str, type[Section], FieldInfo, tuple[object, ...]]]:
    """Every field with its path, its section, and the marks of the sections that it stands in, the innermost first."""
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
    """The mark with absolute keys; a section's mark does not speak of the key that switches it."""
    if mark is None or _absolute(path, mark.key) == path:
        return None
    return replace(mark, key=_absolute(path, mark.key), other=_switch(path, mark.other))


def _mark(kind: type[Mark], metadata: Iterable[object]) -> Mark | None:
    return next((mark for mark in metadata if isinstance(mark, kind)), None)


def _absolute(path: str, key: str) -> str:
    """Resolve a key that is written relative to the section of `path`."""
    if not key.startswith("."):
        return key
    return path.rsplit(".", 1)[0] + key


def _is_mapping(annotation: object) -> bool:
    return get_origin(annotation) is dict or any(_is_mapping(part) for part in get_args(annotation))


def _choices(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


def type_text(annotation: Any, metadata: list[object]) -> str:
    """Word a type: by its `Says` mark, or by its structure."""
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
        return " or ".join(type_text(part, []) for part in get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    return PLAIN_WORDS[origin or annotation]
