"""Keys that have an effect, in general and in a given run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from tether.config import control_defaults, sft
from tether.config.keys import keys, show
from tether.config.schema.section import ActsIf
from tether.runtime.objects import is_object


@cache
def live_keys() -> tuple[str, ...]:
    """Return every key that can change a run: all except aliases."""
    return tuple(path for path, key in keys().items() if not key.alias_of)


def why_idle(path: str, values: Mapping[str, object]) -> str | None:
    """Return why a key has no effect with these values; None if it acts, directly or through a key that inherits it."""
    reason = _why_unread(path, values) or _why_switched_off(path, values)
    return None if reason is None or _acts_elsewhere(path, values) else reason


def is_own_function(value: object) -> bool:
    """Whether a value is ``FILE.py:NAME`` or the name of an object passed from Python."""
    return isinstance(value, str) and (is_object(value) or value.rpartition(":")[0].endswith(".py"))


def is_off(switch: ActsIf, values: Mapping[str, object]) -> bool:
    """Whether the switch is off, given the value of every key."""
    if switch.also is not None and is_off(switch.also, values):
        return True
    value = values[switch.key]
    if is_own_function(value) and switch.own_function:
        return False
    off = value not in switch.on if switch.on is not None else value in (switch.off or ())
    return off and (switch.other is None or is_off(switch.other, values))


def condition(switch: ActsIf) -> str:
    """Return a description of when the switched keys have an effect."""
    verb, values = ("is", switch.on) if switch.on is not None else ("is not", switch.off or ())
    text = f"{switch.key} {verb} {' or '.join(map(show, values))}"
    text = text if switch.also is None else f"{text}, and {condition(switch.also)}"
    return text if switch.other is None else f"{text} or {condition(switch.other)}"


def _state(switch: ActsIf, values: Mapping[str, object]) -> str:
    """Return a description of the values that switch the keys off."""
    if switch.also is not None and is_off(switch.also, values):
        return _state(switch.also, values)
    text = f"{switch.key} is {show(values[switch.key])}"
    return text if switch.other is None else f"{text} and {_state(switch.other, values)}"


def _why_unread(path: str, values: Mapping[str, object]) -> str | None:
    if values[sft.SWITCH] and not sft.is_read(path):
        return f"{sft.SWITCH} is true, and fine-tuning does not read it"
    if values[control_defaults.SWITCH] is None or keys()[path].in_embodied:
        return None
    return f"{control_defaults.SWITCH} is set, and embodied runs do not read it"


def _why_switched_off(path: str, values: Mapping[str, object]) -> str | None:
    switch = keys()[path].acts_if
    if switch is None:
        return None
    # The switching key may itself be without effect because another switch is off.
    return _state(switch, values) if is_off(switch, values) else _why_switched_off(switch.key, values)


def _acts_elsewhere(path: str, values: Mapping[str, object]) -> bool:
    heirs = _heirs().get(path, ())
    return any(values[heir] == values[path] and why_idle(heir, values) is None for heir in heirs)


@cache
def _heirs() -> dict[str, list[str]]:
    """Return, for each key, the live keys that inherit from it."""
    heirs = defaultdict[str, list[str]](list)
    for heir in live_keys():
        if (source := keys()[heir].inherits) is not None:
            heirs[source.key].append(heir)
    return heirs
