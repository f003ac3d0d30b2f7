"""Hubs of models and datasets: the hub that a name belongs to, and the error for a refused request."""

from __future__ import annotations

import os
from collections.abc import Mapping

MODELSCOPE = "modelscope:"
"""Prefix of the name of a model or dataset on ModelScope."""


USE_MODELSCOPE = "VERL_USE_MODELSCOPE"
"""verl's environment variable that makes ModelScope the default hub."""


_ON, OFF = ("1", "true", "yes"), ("", "0", "false", "no")


def uses_modelscope(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ModelScope is the default hub.

    Raises:
        ValueError: the variable is neither true nor false; a misspelt value would otherwise select the wrong hub.
    """
    value = environment.get(USE_MODELSCOPE, "")
    if value.lower() not in _ON + OFF:
        raise ValueError(f"{USE_MODELSCOPE}={value}: is neither true nor false. Set it to True or False, or unset it.")
    return value.lower() in _ON


def hub_error(request: str, hub: str, why: str, fix: str) -> ValueError:
    """Return the error for a request that was refused by a hub."""
    return ValueError(f"{request} {hub} does not give it ({why}). {fix[:1].upper()}{fix[1:]}")
