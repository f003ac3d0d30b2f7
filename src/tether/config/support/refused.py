"""Refused choices of verl's keys; keys that are refused altogether are in `verl_keys.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tether.config.keys import Key, keys, show
from tether.config.loading.settings import Settings
from tether.config.problems import Problem


def refusals(settings: Settings, values: Mapping[str, object]) -> list[Problem]:
    """Return one problem for each refused choice and reason, at the first such key that the user set."""
    refused: dict[tuple[str, str], list[Key]] = {}
    for key in keys().values():
        if key.path in settings and key.refuses is not None and _names(values[key.path]) & set(key.refuses.choices):
            refused.setdefault((show(values[key.path]), key.refuses.why), []).append(key)
    return [_refusal(value, why, first, others) for (value, why), (first, *others) in refused.items()]


def _names(value: object) -> set[object]:
    return set(value if isinstance(value, tuple) else (value,))


def _refusal(value: str, why: str, key: Key, others: Sequence[Key]) -> Problem:
    also = f", as in {', '.join(other.path for other in others)}" if others else ""
    return Problem(key.path, f"{value} is refused{also}: {why}", "use one of " + ", ".join(key.allowed))
