"""Hubs of models and datasets: which one names are of, and the one sentence for what a hub does not give."""

from __future__ import annotations

import os
from collections.abc import Mapping

MODELSCOPE = "modelscope:"
"""Before the name of a model or dataset of ModelScope."""


USE_MODELSCOPE = "VERL_USE_MODELSCOPE"
"""The environment variable of verl's that makes names ModelScope's."""


def uses_modelscope(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether names of models and datasets are ModelScope's."""
    return environment.get(USE_MODELSCOPE, "").lower() in ("1", "true", "yes")


def refusal(asked: str, hub: str, why: str, fix: str) -> ValueError:
    """The error for something that a hub does not give."""
    return ValueError(f"{asked} {hub} does not give it ({why}). {fix[:1].upper()}{fix[1:]}")
