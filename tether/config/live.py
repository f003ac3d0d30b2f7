"""Which keys act: in tether at all, and in one run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tether.config import embodied
from tether.config.elsewhere import ELSEWHERE
from tether.config.keys import keys, show
from tether.config.patterns import look_up
from tether.config.refused import REFUSED, allowed_choices
from tether.config.switches import SWITCHED, Switch


@cache
def live_keys() -> tuple[str, ...]:
    """Every key that can change what a run does: each must be read somewhere."""
    return tuple(path for path in keys() if _can_act(path))


def why_idle(path: str, values: Mapping[str, Any]) -> str | None:
    """Why a key does nothing in a run with these values; None where it acts."""
    if values[embodied.SWITCH] is not None and not embodied.reads(path):
        return f"{embodied.SWITCH} is set, and embodied runs do not read it"
    switch = look_up(SWITCHED, path)
    if switch is not None and switch.is_off(values):
        return f"{switch.key} is {show(values[switch.key])}"
    return look_up(ELSEWHERE, path)


def _can_act(path: str) -> bool:
    refused, switch = look_up(REFUSED, path), look_up(SWITCHED, path)
    fixed = (refused is not None and refused.values is None) or len(allowed_choices(keys()[path])) == 1
    stuck = switch is not None and _is_stuck_off(switch)
    return not (fixed or stuck or keys()[path].alias_of or look_up(ELSEWHERE, path))


def _is_stuck_off(switch: Switch) -> bool:
    """Whether every value that would switch on is refused."""
    refused = look_up(REFUSED, switch.key)
    if refused is None:
        return False
    if refused.values is None:
        return switch.is_off({switch.key: keys()[switch.key].default})
    return switch.on is not None and set(switch.on) <= set(refused.values)
