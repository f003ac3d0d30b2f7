"""Factories of common rules, each with one message."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

from tether.config.devices import PATH, device_count, misplaced, placed
from tether.config.keys import keys, show
from tether.config.problems import Problem
from tether.config.schema.root import RunConfig

Rule: TypeAlias = Callable[[RunConfig], Problem | None]
Condition = Callable[[RunConfig], bool]
Numbers = Callable[[Any, Any], bool]


def at_most(key: str, limit: str, when: Condition = lambda cfg: True) -> Rule:
    """Return the rule that a number is at most another key's."""
    what, fix = "{own}{default} is more than {limit}={other}", "set it to at most {other}"
    return _pair(key, limit, lambda a, b: a > b, what, fix, when)


def multiple(key: str, of: str) -> Rule:
    """Return the rule that a number is a multiple of another key's."""
    what, fix = "{own} is no multiple of {limit}={other}", "set it to a multiple of {other}"
    return _pair(key, of, lambda a, b: a % b != 0, what, fix)


def divides_devices(key: str, model: str, when: Condition = lambda cfg: True) -> Rule:
    """Return the rule that a key's group size divides the devices of a model; -1 means all of them."""

    def rule(cfg: RunConfig) -> Problem | None:
        root: Any = cfg
        group_size = reduce(getattr, key.split("."), root)
        if group_size <= 0 or device_count(cfg) == 1 or misplaced(cfg) or not when(cfg):
            return None
        devices_by_model = placed(cfg)
        devices = len(devices_by_model.get(model, devices_by_model["actor"]))
        if devices % group_size == 0:
            return None
        source = "trainer.n_gpus_per_node x trainer.nnodes" if devices == cfg.trainer.devices else PATH
        what = f"{group_size} does not divide the {devices} devices ({source})"
        return Problem(key, what, f"set it to a divisor of {devices}")

    return rule


def same(key: str, other: str) -> Rule:
    """Return the rule that two keys for the same quantity are equal."""
    return _pair(key, other, lambda a, b: a != b, "{own} contradicts {limit}={other}", "leave {key} out")


def needs(key: str, switch: str) -> Rule:
    """Return the rule that a key requires a switch to be on."""
    what, fix = "{own} needs what {limit}={other} leaves out", "leave {key} out"
    return _pair(key, switch, lambda a, b: a is not None and b is False, what, fix)


def together(key: str, other: str) -> Rule:
    """Return the rule that a key must be set if another one is."""
    what, fix = "missing beside {limit}={other}", "give both, or neither"
    return _pair(key, other, lambda a, b: a is None and b is not None, what, fix)


def set_once(steps: str, share: str) -> Rule:
    """Return the rule that a length is set either in steps (not negative) or as a share of all steps (not 0)."""
    what, fix = "{own} and {limit}={other} say the same thing twice", f"keep {steps} or {share}"
    return _pair(steps, share, lambda a, b: a >= 0 and b > 0, what, fix)


def _pair(key: str, other: str, broken: Numbers, what: str, fix: str, when: Condition = lambda cfg: True) -> Rule:
    def rule(cfg: RunConfig) -> Problem | None:
        mine, theirs = (reduce(getattr, path.split("."), cfg) for path in (key, other))
        if not when(cfg) or not broken(mine, theirs):
            return None
        default = " (the default)" if mine == keys()[key].default else ""
        words = {"key": key, "own": show(mine), "default": default, "limit": other, "other": show(theirs)}
        return Problem(key, what.format(**words), fix.format(**words))

    return rule
