"""One keyword vocabulary for all functions of a registry, though each function names only what it uses.

Arguments are checked here, too, and kept from carrying a gradient to where none belongs.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from tether.algorithms.checks import checker

Result = TypeVar("Result")


def needs(function: Callable[..., object]) -> frozenset[str]:
    """Name the keyword arguments that a function cannot do without, for example ``{"values"}`` for `gae`."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def uniform(
    functions: Mapping[str, Callable[..., Result]], meaning: Mapping[str, str], *, learns: str | None = None
) -> dict[str, Callable[..., Result]]:
    """Let every function of a registry be called with the keywords of all of them.

    A keyword that a function does not declare is ignored if another one of the registry declares it, and refused with
    a TypeError if none does. Arguments that do not fit their annotations raise a ValueError (`checks`).

    Args:
        functions: the registry, by name.
        meaning: for each required keyword, its shape and meaning, to explain its absence: a function that needs a
            keyword that is not given, or is None, raises a ValueError that names both.
        learns: the one argument that a gradient may reach; None: no argument, and results have no gradient.
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
        kept = {key: value for key, value in keywords.items() if key in declared}
        check(tensors, kept)
        given = dict(zip(names, tensors, strict=False)) | kept
        live = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.requires_grad}
        if not live:
            return function(*tensors, **kept)
        if learns is None:
            with torch.no_grad():
                return function(*tensors, **kept)
        if learns not in live and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {next(iter(live))} has a gradient, and {learns} has none. "
                f"The order is ({', '.join(names[:4])}, ...), where verl has the old log-probabilities first"
            )
        constants = {key: value.detach() for key, value in live.items() if key != learns}
        return function(**given | constants)

    return call
