"""Which keys act: in tether at all, and in one run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tether.config import control_defaults
from tether.config.keys import keys
from tether.config.support.no_effect import ELSEWHERE
from tether.config.support.patterns import look_up
from tether.config.support.refused import REFUSED, allowed_choices
from tether.config.support.switches import SWITCHED, Switch


@cache
def live_keys() -> tuple[str, ...]:
    """Every key that can change what a run does: each must be read somewhere."""
    return tuple(path for path in keys() if _can_act(path))


def why_idle(path: str, values: Mapping[str, Any]) -> str | None:
    """Why a key does nothing in a run with these values; None where it acts, by itself or in a key that inherits it."""
    reason = _why_unread(path, values) or _why_switched_off(path, values) or look_up(ELSEWHERE, path)
    return None if reason is None or _acts_elsewhere(path, values) else reason


def _why_unread(path: str, values: Mapping[str, Any]) -> str | None:
    if values[control_defaults.SWITCH] is None or control_defaults.reads(path):
        return None
    return f"{control_defaults.SWITCH} is set, and embodied runs do not read it"


def _why_switched_off(path: str, values: Mapping[str, Any]) -> str | None:
    switch = look_up(SWITCHED, path)
    if switch is None or switch.key == path:  # a pattern covers its switch, too
        return None
    # A switch that is on may be switched off itself.
    return switch.state(values) if switch.is_off(values) else _why_switched_off(switch.key, values)


def _acts_elsewhere(path: str, values: Mapping[str, Any]) -> bool:
    heirs = (heir for heir in live_keys() if (source := keys()[heir].inherits) is not None and source.key == path)
    return any(values[heir] == values[path] and why_idle(heir, values) is None for heir in heirs)


def _can_act(path: str) -> bool:
    refused, switch = look_up(REFUSED, path), look_up(SWITCHED, path)
    fixed = (refused is not None and refused.values is None) or len(allowed_choices(keys()[path])) == 1
    stuck = switch is not None and _is_stuck_off(switch)
    return not (fixed or stuck or keys()[path].alias_of or look_up(ELSEWHERE, path))


def _is_stuck_off(switch: Switch) -> bool:
    """Whether every value that would switch on is refused."""
    refused = look_up(REFUSED, switch.key)
    if refused is None or (switch.other is not None and not _is_stuck_off(switch.other)):
        return False
    if refused.values is None:
        return switch.is_off({switch.key: keys()[switch.key].default})
    return switch.on is not None and set(switch.on) <= set(refused.values)
