"""One set of keywords for all functions of a registry, of which each function declares only those that it uses.

Arguments are also validated, and detached unless they may have a gradient.
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
    """Return the keyword arguments that a function requires, for example ``{"values"}`` for `gae`."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def uniform(
    functions: Mapping[str, Callable[..., Result]], meaning: Mapping[str, str], *, learns: str | None = None
) -> dict[str, Callable[..., Result]]:
    """Wrap every function of a registry so that it accepts the keywords of all of them.

    A keyword that a function does not declare is ignored if another function of the registry declares it, and raises a
    TypeError if none does. Arguments that do not match their annotations raise a ValueError (`checks`).

    Args:
        functions: the functions by name.
        meaning: shape and meaning of each required keyword, for the ValueError that a function raises if the keyword
            is missing or None.
        learns: the only argument that gets a gradient; with None, no argument does, and results have no gradient.
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
