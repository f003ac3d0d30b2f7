"""Registries of functions, which give all functions of a registry the same keywords and validate arguments.

A function declares only the keywords that it uses (`uniform`). Arguments are detached unless they may have a gradient,
and validated by the annotations of the function: types, shapes, devices, and ranges of numbers.

Without validation, broadcasting turns a wrong shape into a plausible result: with a mask [B, T], scores of shape [B, 1]
would count T times. Only shapes, types, devices and Python numbers are checked, so that no check waits for a GPU.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """A range of finite numbers that includes its upper bound, and its lower bound unless it is ``open``."""

    low: float = -math.inf
    high: float = math.inf
    open: bool = False

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.low <= number <= self.high and not (self.open and number == self.low)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number" if self.high == math.inf else f"a number, {self.high:g} or below"
        if self.high < math.inf:
            return f"a number from {self.low:g} to {self.high:g}"
        return f"a number above {self.low:g}" if self.open else f"a number, {self.low:g} or above"


Fraction = Annotated[float, Range(0, 1)]
NonNegative = Annotated[float, Range(0)]
NonPositive = Annotated[float, Range(high=0)]
Positive = Annotated[float, Range(0, open=True)]
AboveOne = Annotated[float, Range(1, open=True)]
PositiveInt = Annotated[int, Range(1)]


def checked(function: Callable[P, Result]) -> Callable[P, Result]:
    """Wrap a function so that it rejects arguments that do not match its annotations.

    A call raises ValueError for a tensor whose type, shape or device does not match the annotations and the other
    arguments, or for a number outside its `Range`. The message names the argument and the expected value.
    """
    check = checker(function.__qualname__.removesuffix(".__init__"), function)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> Result:
        check(args, keywords)
        return function(*args, **keywords)

    return call


def checker(name: str, function: Callable[..., object]) -> Callable[[Sequence[object], Mapping[str, object]], None]:
    """Return the check that `checked` performs, which takes the positional and keyword arguments of a call.

    It ignores unknown and missing arguments, because the call itself raises an error for them.

    Args:
        name: name of the function in messages.
        function: the function whose annotations are checked.
    """
    annotations = get_type_hints(inspect.unwrap(function), include_extras=True)
    names = tuple(inspect.signature(function).parameters)
    rules = {key: _Rule.of(annotations[key]) for key in names if key in annotations}

    def check(args: Sequence[object], keywords: Mapping[str, object]) -> None:
        arguments = [*zip(names, args, strict=False), *keywords.items()]
        sizes: dict[str, int | Shape] = {}
        device: torch.device | None = None
        for key, value in arguments:
            rule = rules.get(key)
            if rule is None or (value is None and rule.optional):
                continue
            dims = rule.dims_of(value)
            if dims is None:
                if not rule.accepts(value):
                    raise ValueError(f"{name}: {key} {_describe(value)}; expected {rule.expected}")
                continue
            if not _fits(dims, _shape(value), sizes):
                raise ValueError(f"{name}: {_misfit([(k, v, rules[k]) for k, v in arguments if k in rules])}")
            if isinstance(value, Tensor) and value.ndim:
                device = device or value.device
                if value.device != device:
                    raise ValueError(f"{name}: {key} is on {value.device}; expected {device}, as the other tensors")

    return check


@dataclass(frozen=True)
class _Array:
    kind: type
    dtypes: frozenset[torch.dtype] | None
    """The allowed dtypes; None allows any, including arrays that are not tensors."""
    dims: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, annotation: Any) -> _Array:
        """Parse an array type of jaxtyping."""
        dims = tuple(annotation.dim_str.split())
        if annotation.array_type is not Tensor:
            return cls(annotation.array_type, None, dims, f"an array [{', '.join(dims)}]")
        dtypes = None
        if isinstance(annotation.dtypes, tuple):
            dtypes = frozenset(getattr(torch, name) for name in annotation.dtypes if hasattr(torch, name))
        what = {"Float": "a floating-point tensor", "Int": "a tensor of integers", "Bool": "a tensor of booleans"}
        return cls(Tensor, dtypes, dims, f"{what.get(annotation.dtype.__name__, 'a tensor')} [{', '.join(dims)}]")


@dataclass(frozen=True)
class _Rule:
    """The values that an annotation allows."""

    arrays: tuple[_Array, ...]
    numbers: tuple[tuple[type, Range], ...]
    classes: tuple[type, ...]
    """Classes of non-array values, which are only checked by type. A sequence is accepted as an array of its length."""
    optional: bool
    expected: str

    @classmethod
    def of(cls, annotation: Any) -> _Rule:
        """Parse an annotation: a union of arrays, numbers (with a `Range`) and classes."""
        arrays, numbers, classes, texts = [], [], [], []
        options = list(_options(annotation))
        for option in options:
            base = get_args(option)[0] if get_origin(option) is Annotated else option
            if hasattr(base, "dim_str"):
                arrays.append(_Array.of(base))
                texts.append(arrays[-1].text)
            elif base in (float, int):
                limits = next((extra for extra in get_args(option)[1:] if isinstance(extra, Range)), Range())
                numbers.append((Integral if base is int else Real, limits))
                texts.append(str(limits).replace("number", "whole number") if base is int else str(limits))
            elif base is not type(None):
                classes.append(get_origin(base) or base)
                texts.append({str: "a string", bool: "True or False"}.get(base, f"a {classes[-1].__name__}"))
        return cls(tuple(arrays), tuple(numbers), tuple(classes), type(None) in options, " or ".join(texts))

    def dims_of(self, value: object) -> tuple[str, ...] | None:
        """Return the dimensions that an array, or a sequence used as one, must have; None for any other value."""
        for array in self.arrays:
            if isinstance(value, array.kind) and (
                array.dtypes is None or getattr(value, "dtype", None) in array.dtypes
            ):
                return array.dims
        # The class is looked up first, because isinstance(number, Sequence) costs more than all other checks together.
        is_sequence = Sequence in self.classes and isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return self.arrays[0].dims if is_sequence else None

    def accepts(self, value: object) -> bool:
        """Return whether a value that is not an array is allowed."""
        if self.numbers and isinstance(value, Real) and not isinstance(value, bool):
            return any(isinstance(value, kind) and float(value) in limits for kind, limits in self.numbers)
        return any(kind is not Sequence and isinstance(value, kind) for kind in self.classes)


def _options(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if hasattr(value, "shape") else (len(value),)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"is a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"is {value!r}" if isinstance(value, Real | str | None) else f"is of type {type(value).__name__}"


def _fits(dims: tuple[str, ...], shape: Shape, sizes: dict[str, int | Shape]) -> bool:
    """Return whether a shape has these dimensions, and add the sizes of new dimensions to `sizes`.

    ``*name`` matches any number of dimensions, and ``#name`` also matches 1.
    """
    if dims and dims[0].startswith("*"):
        split = len(shape) - len(dims) + 1
        if split < 0 or sizes.setdefault(dims[0], shape[:split]) != shape[:split]:
            return False
        dims, shape = dims[1:], shape[split:]
    if len(dims) != len(shape):
        return False
    for dim, size in zip(dims, shape, strict=True):
        if not (dim.startswith("#") and size == 1) and sizes.setdefault(dim.removeprefix("#"), size) != size:
            return False
    return True


def _misfit(arguments: Sequence[tuple[str, object, _Rule]]) -> str:
    """Describe the argument whose shape conflicts with most of the other arguments that share a dimension with it."""
    arrays = [(key, _shape(value), dims) for key, value, rule in arguments if (dims := rule.dims_of(value)) is not None]
    bound: dict[str, dict[str, int | Shape]] = {}
    for key, shape, dims in arrays:
        sizes: dict[str, int | Shape] = {}
        if not _fits(dims, shape, sizes):
            return f"{key} has shape {list(shape)}; expected [{', '.join(dims)}]"
        bound[key] = sizes

    def conflicts(key: str) -> list[str]:
        sizes = bound[key].items()
        return [other for other, its in bound.items() if any(its.get(dim, size) != size for dim, size in sizes)]

    reference = min((key for key in bound if conflicts(key)), key=lambda key: (len(conflicts(key)), "mask" not in key))
    wrong = conflicts(reference)[0]
    shape, like = (next(shape for key, shape, _ in arrays if key == name) for name in (wrong, reference))
    dims = next(dims for key, _, dims in arrays if key == wrong)
    sizes = bound[wrong] | bound[reference]
    expected = [str(size) for dim in dims for size in _listed(sizes.get(dim.removeprefix("#"), 1))]
    symbols = "" if dims[0].startswith("*") else f"[{', '.join(dims)}] = "
    return f"{wrong} has shape {list(shape)}; expected {symbols}[{', '.join(expected)}], as in {reference} {list(like)}"


def _listed(size: int | Shape) -> Shape:
    return size if isinstance(size, tuple) else (size,)


def needs(function: Callable[..., object]) -> frozenset[str]:
    """Return the keyword arguments that a function requires, for example ``{"values"}`` for `gae`."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def uniform(
    functions: Mapping[str, Callable[..., Result]], meaning: Mapping[str, str], *, learns: str | None = None
) -> dict[str, Callable[..., Result]]:
    """Wrap every function of a registry so that it accepts the keywords of all of them.

    A keyword that a function does not declare is ignored if another function of the registry declares it, and raises a
    TypeError if none does. Arguments that do not match their annotations raise a ValueError.

    Args:
        functions: the functions by name.
        meaning: shape and meaning of each required keyword, for the ValueError that a function raises if the keyword
            is missing or None.
        learns: the only argument through which gradients flow; with None, all are detached and results have no
            gradient.
    """
    declared = {name: frozenset(inspect.signature(function).parameters) for name, function in functions.items()}
    vocabulary = frozenset().union(*declared.values())
    return {
        name: _accept(name, function, declared[name], vocabulary, meaning, learns)
        for name, function in functions.items()
    }


def _accept(
    name: str,
    function: Callable[..., Result],
    declared: frozenset[str],
    vocabulary: frozenset[str],
    meaning: Mapping[str, str],
    learns: str | None,
) -> Callable[..., Result]:
    required = sorted(needs(function))
    check = checker(name, function)
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*tensors: Tensor, **keywords: object) -> Result:
        if unknown := sorted(keywords.keys() - vocabulary):
            raise TypeError(f"{name}: unknown keyword {', '.join(unknown)}. Known: {', '.join(sorted(vocabulary))}")
        if missing := [f"{key}={meaning[key]}" for key in required if keywords.get(key) is None]:
            raise ValueError(f"{name} needs {' and '.join(missing)}")
        accepted = {key: value for key, value in keywords.items() if key in declared}
        check(tensors, accepted)
        arguments = dict(zip(names, tensors, strict=False)) | accepted
        live = {key: value for key, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}
        if not live:
            return function(*tensors, **accepted)
        if learns is None:
            with torch.no_grad():
                return function(*tensors, **accepted)
        if learns not in live and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {next(iter(live))} has a gradient, and {learns} has none. "
                f"The order is ({', '.join(names[:4])}, ...), where verl has the old log-probabilities first"
            )
        constants = {key: value.detach() for key, value in live.items() if key != learns}
        return function(**arguments | constants)

    return call
