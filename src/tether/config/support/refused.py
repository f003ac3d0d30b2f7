"""Choices of keys that verl has and tether refuses; keys that are refused as a whole stand in `verl_keys.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tether.config.keys import Key, keys, show
from tether.config.loading.given import Given
from tether.config.problems import Problem


def refusals(given: Given, values: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each refused choice and reason, at the first key that the user gave it.

    Args:
        given: what the user gave.
        values: every key of the loaded config.
    """
    asked: dict[tuple[str, str], list[Key]] = {}
    for key in keys().values():
        if key.path in given and key.refuses is not None and _names(values[key.path]) & set(key.refuses.choices):
            asked.setdefault((show(values[key.path]), key.refuses.why), []).append(key)
    return [_refusal(value, why, first, others) for (value, why), (first, *others) in asked.items()]


def _names(value: object) -> set[object]:
    return set(value if isinstance(value, tuple) else (value,))


def _refusal(value: str, why: str, key: Key, others: Sequence[Key]) -> Problem:
    too = f", as in {', '.join(other.path for other in others)}" if others else ""
    return Problem(key.path, f"{value} is refused{too}: {why}", "use one of " + ", ".join(key.allowed))
