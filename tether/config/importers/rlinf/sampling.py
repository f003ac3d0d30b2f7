"""How policies of action tokens draw them: `rollout.sampling_params`, in older files `algorithm.sampling_params`."""

from __future__ import annotations

from typing import Any

from tether.config.importers.rlinf.rows import UNSET, Convert, Mapped, NotRead, Table, Unsupported, Values, to
from tether.config.schema.env import VLA_TYPES

TODAY = "rollout.sampling_params"
OLDER = "algorithm.sampling_params"
BINS = 256
"""Values of a dimension of an action."""


def _read(section: str, convert: Convert) -> Convert:
    def converted(value: object, values: Values) -> object:
        if values.get("actor.model.model_type") not in VLA_TYPES:
            raise NotRead("policies of action tokens read it, and no others")
        if section == OLDER and any(key.startswith(f"{TODAY}.") for key in values):
            raise NotRead(f"{TODAY} is read in its place")
        return convert(value, values)

    return converted


def _sampled(fine: bool) -> Convert:
    def convert(value: object, values: Values) -> object:
        if value not in (fine, None):
            raise Unsupported("actions are sampled in training")
        return UNSET

    return convert


def _tests(value: Any, values: Values) -> object:
    if value is not None and value > 0:
        raise Unsupported("tests take the likeliest actions")
    return UNSET


def _likeliest(value: Any, values: Values) -> object:
    if value is not None and 0 < value < BINS:
        raise Unsupported("actions are drawn from all values; set 0")
    return UNSET


def _nucleus(value: object, values: Values) -> object:
    if value not in (1, None):
        raise Unsupported("actions are drawn from all values; set 1")
    return UNSET


def sampling(section: str) -> Table:
    """Rows of one of the two sections."""

    def both(value: object, values: Values) -> object:
        if values.get(f"{section}.temperature_train") is not None:
            raise NotRead("temperature_train and temperature_eval go before it")
        return value

    def row(convert: Convert) -> Mapped:
        return to("policy.temperature", by=_read(section, convert))

    return {
        f"{section}.do_sample": row(_sampled(True)),
        f"{section}.use_greedy": row(_sampled(False)),
        f"{section}.temperature_train": row(lambda value, values: value),
        f"{section}.temperature": row(both),
        f"{section}.temperature_eval": row(_tests),
        f"{section}.top_k": row(_likeliest),
        f"{section}.top_p": row(_nucleus),
    }
