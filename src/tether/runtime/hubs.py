"""Hubs of models and datasets: which one names are of, and the one sentence for what a hub does not give."""

from __future__ import annotations

import os
from collections.abc import Mapping

MODELSCOPE = "modelscope:"
"""Before the name of a model or dataset of ModelScope."""


USE_MODELSCOPE = "VERL_USE_MODELSCOPE"
"""The environment variable of verl's that makes names ModelScope's."""


_ON, OFF = ("1", "true", "yes"), ("", "0", "false", "no")


def uses_modelscope(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether names of models and datasets are ModelScope's.

    Raises:
        ValueError: the variable is neither true nor false: a misspelt one would ask another hub for the same name.
    """
    value = environment.get(USE_MODELSCOPE, "")
    if value.lower() not in _ON + OFF:
        raise ValueError(f"{USE_MODELSCOPE}={value}: is neither true nor false. Set it to True or False, or unset it.")
    return value.lower() in _ON


def refusal(asked: str, hub: str, why: str, fix: str) -> ValueError:
    """The error for something that a hub does not give."""
    return ValueError(f"{asked} {hub} does not give it ({why}). {fix[:1].upper()}{fix[1:]}")
