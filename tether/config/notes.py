"""What a run should know about its configuration and would not see in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tether.config import embodied
from tether.config.given import Given
from tether.config.keys import Key, keys, show
from tether.config.live import why_idle

ACTOR = "actor_rollout_ref.actor"


def notes(given: Given, values: Mapping[str, Any]) -> list[str]:
    """Notes on the keys that the user gave; `values` holds every key of the loaded config."""
    found = (_engine(values), _clip_ratio(given, values), *_idle(given, values))
    return [note for note in found if note is not None]


def _engine(values: Mapping[str, Any]) -> str | None:
    name = values["actor_rollout_ref.rollout.name"]
    if name == "native":
        return None
    return f"actor_rollout_ref.rollout.name={name}: this installation samples with the native engine instead"


def _clip_ratio(given: Given, values: Mapping[str, Any]) -> str | None:
    both = f"{ACTOR}.clip_ratio_low" in given and f"{ACTOR}.clip_ratio_high" in given
    sides = {values[f"{ACTOR}.clip_ratio_low"], values[f"{ACTOR}.clip_ratio_high"]}
    if f"{ACTOR}.clip_ratio" not in given or not both or sides == {values[f"{ACTOR}.clip_ratio"]}:
        return None
    return f"no effect: {ACTOR}.clip_ratio={values[f'{ACTOR}.clip_ratio']} (clip_ratio_low and clip_ratio_high are set)"


def _idle(given: Given, values: Mapping[str, Any]) -> list[str]:
    """One note for each reason, with all the keys that it silences."""
    silenced: dict[str, list[str]] = defaultdict(list)
    for path, setting in given.items():
        reason = why_idle(path, values)
        if reason is not None and setting.source != embodied.SOURCE and _differs(keys()[path], values):
            silenced[reason].append(f"{path}={show(values[path])}")
    return [f"no effect: {', '.join(settings)} ({reason})" for reason, settings in silenced.items()]


def _differs(key: Key, values: Mapping[str, Any]) -> bool:
    default = values[key.inherits.key] if key.inherits else key.default
    return bool(values[key.path] != default)
