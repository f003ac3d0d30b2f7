"""Converts spaces to and from JSON, to save the spaces of its environment with a policy."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from gymnasium import spaces

from tether.control.envs.gymnasium_types import Raw, Space
from tether.observations import Array
from tether.types import JsonObject

Spaces: TypeAlias = tuple[Space, Space]
"""The observation space and the action space of one environment."""


def spaces_as_json(pair: Spaces) -> JsonObject:
    """Return both spaces as JSON values."""
    return dict(zip(("observation", "action"), map(_as_json, pair), strict=True))


def spaces_from_json(saved: JsonObject) -> Spaces:
    """Return the spaces that `spaces_as_json` wrote."""
    return _from_json(saved["observation"]), _from_json(saved["action"])


def _as_json(space: Space) -> JsonObject:
    match space:
        case spaces.Dict():
            return {"type": "Dict", "spaces": {name: _as_json(inner) for name, inner in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": list(map(_as_json, space.spaces))}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
        case spaces.Text():
            return {"type": "Text", "max_length": int(space.max_length)}
        case spaces.Box():
            bounds = {"low": _bound(space.low), "high": _bound(space.high)}
            return {"type": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    raise AssertionError(space)  # environments with other spaces are refused


def _from_json(saved: JsonObject) -> Space:
    match saved["type"]:
        case "Dict":
            return spaces.Dict({name: _from_json(inner) for name, inner in saved["spaces"].items()})
        case "Tuple":
            return spaces.Tuple(list(map(_from_json, saved["spaces"])))
        case "Discrete":
            return spaces.Discrete(saved["n"], start=saved["start"])
        case "MultiDiscrete":
            return spaces.MultiDiscrete(np.array(saved["nvec"]), start=np.array(saved["start"]))
        case "MultiBinary":
            return spaces.MultiBinary(saved["n"])
        case "Text":
            return spaces.Text(saved["max_length"])
    shape, dtype = tuple(saved["shape"]), np.dtype(saved["dtype"])
    low, high = (np.broadcast_to(np.array(_numbers(saved[name]), dtype), shape) for name in ("low", "high"))
    return spaces.Box(low, high, dtype=dtype.type)


def _bound(bound: Array) -> Raw:
    """Return the numbers of a bound, or a single one if all are equal; infinity, which JSON lacks, is a string."""
    if bound.size and (bound == bound.flat[0]).all():
        bound = bound.reshape(-1)[0]
    return _texts(bound.tolist())


def _texts(numbers: Raw) -> Raw:
    if isinstance(numbers, list):
        return list(map(_texts, numbers))
    return numbers if np.isfinite(numbers) else str(numbers)


def _numbers(saved: Raw) -> Raw:
    if isinstance(saved, list | tuple):
        return list(map(_numbers, saved))
    return float(saved) if isinstance(saved, str) else saved
