"""A user's reward function: loaded from a Python file and checked before anything expensive starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from tether.runtime.objects import is_object, registered_object
from tether.runtime.user_files import import_python_file
from tether.spelling import did_you_mean
from tether.text.rewards.router import RewardFunction

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
LISTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Arguments of a function that scores all responses at once: lists with one item per response."""
_KEY = "custom_reward_function"


@dataclass(frozen=True)
class CustomReward:
    """Location of a user's function: `custom_reward_function.{path,name,reward_kwargs}`, or a part of the reward."""

    path: str
    name: str = "compute_score"
    reward_kwargs: dict[str, object] = field(default_factory=dict)
    key: str = _KEY
    """Configuration section that names it, for messages."""
    arguments: tuple[str, ...] = ARGUMENTS
    """Names of its arguments: those for one response, or `LISTS`."""


def load_reward_function(
    path: str | Path,
    name: str,
    reward_kwargs: Mapping[str, object],
    key: str = _KEY,
    arguments: Sequence[str] = ARGUMENTS,
) -> RewardFunction:
    """Load the function from a file or from the objects of this process, with `reward_kwargs` bound.

    Args:
        path: path of the file.
        name: name of the function.
        reward_kwargs: additional arguments of the function.
        key: configuration section that names it, for messages.
        arguments: names of the arguments of each call.

    Raises:
        ValueError: the file is missing or cannot be imported, or the function is missing, is not callable, or does not
            accept the arguments.
    """
    if is_object(path):
        function = registered_object(str(path))
        if not callable(function):
            raise ValueError(f"reward={function!r:.80}: is not a function; it is called as {_call_syntax(arguments)}")
        name = getattr(function, "__name__", type(function).__name__)
        check_call(inspect.signature(function), Path("reward"), name, reward_kwargs, arguments=arguments)
        return functools.partial(function, **reward_kwargs)
    module = import_python_file(path, f"{key}.path")
    function = vars(module).get(name)
    if function is None:
        raise ValueError(_missing(module, Path(path), name, key))
    if not callable(function):
        raise ValueError(f"{key}.name={name}: {path} defines it as {type(function).__name__}, not as a function")
    check_call(inspect.signature(function), Path(path), name, reward_kwargs, key, arguments)
    return functools.partial(function, **reward_kwargs)


def _call_syntax(arguments: Sequence[str]) -> str:
    return f"({', '.join(arguments)}, **reward_kwargs)"


def _missing(module: ModuleType, path: Path, name: str, key: str) -> str:
    names = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
    hint = did_you_mean(name, names)
    return f"{key}.name={name}: {path} has no such function.{hint} It has: {', '.join(names) or 'no function at all'}"


def check_call(
    signature: inspect.Signature,
    path: Path,
    name: str,
    reward_kwargs: Mapping[str, object],
    key: str = _KEY,
    arguments: Sequence[str] = ARGUMENTS,
) -> None:
    """Check that a function accepts the arguments of reward functions.

    Raises:
        ValueError: the function has other parameters, or a name in `reward_kwargs` is one of `arguments`.
    """
    if clash := sorted(set(reward_kwargs) & set(arguments)):
        raise ValueError(f"{key}.reward_kwargs: {', '.join(clash)} comes from the row; choose another name")
    try:
        signature.bind(**dict.fromkeys(arguments), **reward_kwargs)
    except TypeError as error:
        context = f" with reward_kwargs {sorted(reward_kwargs)}" if reward_kwargs else ""
        context += " by reward_model.reward_manager=batch" if tuple(arguments) == LISTS else ""
        raise ValueError(
            f"{key}.name={name}: {path} defines {name}{signature}, which is called by keyword as "
            f"{name}{_call_syntax(arguments)}{context}: {error}"
        ) from error
