"""Rows of action token sampling: `rollout.sampling_params`, in older files `algorithm.sampling_params`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tether.control.policies.config import VLA_TYPES
from tether.integrations.rlinf.rows import UNSET, Convert, Mapped, NotRead, Table, Unsupported, Values, to

TODAY = "rollout.sampling_params"
OLDER = "algorithm.sampling_params"
BINS = 256
"""Number of values of an action dimension."""


def _read(section: str, convert: Convert) -> Convert:
    def converted(value: object, values: Values) -> object:
        if values.get("actor.model.model_type") not in VLA_TYPES:
            raise NotRead("policies of action tokens read it, and no others")
        if section == OLDER and any(key.startswith(f"{TODAY}.") for key in values):
            raise NotRead(f"{TODAY} is read in its place")
        return convert(value, values)

    return converted


def _refused(why: str, fine: Callable[[Any], bool]) -> Convert:
    """Return the conversion of a key that is refused unless it is null or `fine`, where it has no effect."""

    def convert(value: Any, values: Values) -> object:
        if value is not None and not fine(value):
            raise Unsupported(why)
        return UNSET

    return convert


def sampling(section: str) -> Table:
    """Return the rows of one of the two sections."""
    sampled, all_values = "actions are sampled in training", "actions are drawn from all values"

    def both(value: object, values: Values) -> object:
        if values.get(f"{section}.temperature_train") is not None:
            raise NotRead("temperature_train and temperature_eval go before it")
        return value

    def row(convert: Convert) -> Mapped:
        return to("policy.temperature", by=_read(section, convert))

    return {
        f"{section}.do_sample": row(_refused(sampled, lambda value: bool(value == 1))),
        f"{section}.use_greedy": row(_refused(sampled, lambda value: bool(value == 0))),
        f"{section}.temperature_train": row(lambda value, values: value),
        f"{section}.temperature": row(both),
        f"{section}.temperature_eval": row(_refused("tests take the likeliest actions", lambda value: value <= 0)),
        f"{section}.top_k": row(_refused(f"{all_values}; set 0", lambda value: not 0 < value < BINS)),
        f"{section}.top_p": row(_refused(f"{all_values}; set 1", lambda value: bool(value == 1))),
    }
