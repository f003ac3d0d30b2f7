"""Choices of keys that verl has and tether refuses; keys that are refused as a whole stand in `verl_keys.toml`."""

from __future__ import annotations

from collections.abc import Mapping

from tether.config.keys import Key, keys, show
from tether.config.loading.given import Given
from tether.config.problems import Problem


def refusals(given: Given, values: Mapping[str, object]) -> list[Problem]:
    """A problem for each key that the user gave a refused value; `values` holds every key of the loaded config."""
    problems = (_refusal(key, values[key.path]) for key in keys().values() if key.path in given)
    return [problem for problem in problems if problem is not None]


def _refusal(key: Key, value: object) -> Problem | None:
    asked = value if isinstance(value, tuple) else (value,)
    if key.refuses is None or not set(asked) & set(key.refuses.choices):
        return None
    return Problem(key.path, f"{show(value)} is refused: {key.refuses.why}", "use one of " + ", ".join(key.allowed))
