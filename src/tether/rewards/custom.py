"""A user's own reward function, loaded from a Python file and checked before anything expensive starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from tether.rewards.router import RewardFunction
from tether.runtime.objects import held, is_object
from tether.runtime.user_files import import_python_file
from tether.spelling import did_you_mean

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
LISTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that scores all responses at once, one item a response."""
_KEY = "custom_reward_function"


@dataclass(frozen=True)
class CustomReward:
    """Where a user's function is: `custom_reward_function.{path,name,reward_kwargs}`, or a part of a reward."""

    path: str
    name: str = "compute_score"
    reward_kwargs: dict[str, object] = field(default_factory=dict)
    key: str = _KEY
    """Section of the configuration that names it, for messages."""
    arguments: tuple[str, ...] = ARGUMENTS
    """By which it is called: those of one response, or `LISTS`."""


def load_reward_function(
    path: str | Path,
    name: str,
    reward_kwargs: Mapping[str, object],
    key: str = _KEY,
    arguments: Sequence[str] = ARGUMENTS,
) -> RewardFunction:
    """Import the file and take the function out of it, with `reward_kwargs` bound; or take the object of this process.

    Args:
        path: of the file.
        name: of the function.
        reward_kwargs: more arguments of it.
        key: section of the configuration that names it, for messages.
        arguments: by which it will be called.

    Raises:
        ValueError: no such file, the file cannot be imported, no such function in it, it is not callable, or it does
            not take the arguments it will be called with.
    """
    if is_object(path):
        found = held(str(path))
        if not callable(found):
            raise ValueError(f"reward={found!r:.80}: is no function; it is called as {_called(arguments)}")
        name = getattr(found, "__name__", type(found).__name__)
        check_call(inspect.signature(found), Path("reward"), name, reward_kwargs, arguments=arguments)
        return functools.partial(found, **reward_kwargs)
    module = import_python_file(path, f"{key}.path")
    found = vars(module).get(name)
    if found is None:
        raise ValueError(_missing(module, Path(path), name, key))
    if not callable(found):
        raise ValueError(f"{key}.name={name}: {path} defines it as {type(found).__name__}, not as a function")
    check_call(inspect.signature(found), Path(path), name, reward_kwargs, key, arguments)
    return functools.partial(found, **reward_kwargs)


def _called(arguments: Sequence[str]) -> str:
    return f"({', '.join(arguments)}, **reward_kwargs)"


def _missing(module: ModuleType, path: Path, name: str, key: str) -> str:
    there = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
    hint = did_you_mean(name, there)
    return f"{key}.name={name}: {path} has no such function.{hint} It has: {', '.join(there) or 'no function at all'}"


def check_call(
    signature: inspect.Signature,
    path: Path,
    name: str,
    reward_kwargs: Mapping[str, object],
    key: str = _KEY,
    arguments: Sequence[str] = ARGUMENTS,
) -> None:
    """Refuse a function of this name and signature that does not take what rewards are called with.

    Raises:
        ValueError: it takes other arguments; or an argument of the user's has the name of one that each row gives.
    """
    if clash := sorted(set(reward_kwargs) & set(arguments)):
        raise ValueError(f"{key}.reward_kwargs: {', '.join(clash)} is given by the row; choose another name")
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        given = f" with reward_kwargs {sorted(reward_kwargs)}" if reward_kwargs else ""
        given += " by reward_model.reward_manager=batch" if tuple(arguments) == LISTS else ""
        raise ValueError(
            f"{key}.name={name}: {path} defines {name}{signature}, which is called by keyword as "
            f"{name}{_called(arguments)}{given}: {error}"
        ) from error
