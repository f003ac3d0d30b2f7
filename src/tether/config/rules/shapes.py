"""Rules of common shapes: a row each, with one message for all of a shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

from tether.config.devices import device_count, misplaced, placed
from tether.config.keys import show
from tether.config.placement import PATH
from tether.config.problems import Problem
from tether.config.schema.root import RunConfig

Rule: TypeAlias = Callable[[RunConfig], Problem | None]
Condition = Callable[[RunConfig], bool]
Numbers = Callable[[Any, Any], bool]


def at_most(key: str, limit: str, when: Condition = lambda cfg: True) -> Rule:
    """A number that another key bounds."""
    fix = "set it to at most {other}"
    return _pair(key, limit, lambda a, b: a > b, "{own} is more than {limit}={other}", fix, when)


def multiple(key: str, of: str) -> Rule:
    """A number that another key divides."""
    what, fix = "{own} is no multiple of {limit}={other}", "set it to a multiple of {other}"
    return _pair(key, of, lambda a, b: a % b != 0, what, fix)


def divides_devices(key: str, model: str, when: Condition = lambda cfg: True) -> Rule:
    """Groups of as many devices of a model as a key says, where there are several; -1 is all of them."""

    def rule(cfg: RunConfig) -> Problem | None:
        root: Any = cfg
        each = reduce(getattr, key.split("."), root)
        if each <= 0 or device_count(cfg) == 1 or misplaced(cfg) or not when(cfg):
            return None
        found = placed(cfg)
        devices = len(found.get(model, found["actor"]))
        if devices % each == 0:
            return None
        whose = "trainer.n_gpus_per_node x trainer.nnodes" if devices == cfg.trainer.devices else PATH
        what = f"{each} does not divide the {devices} devices ({whose})"
        return Problem(key, what, f"set it to a divisor of {devices}")

    return rule


def same(key: str, other: str) -> Rule:
    """Two keys for one quantity."""
    return _pair(key, other, lambda a, b: a != b, "{own} contradicts {limit}={other}", "leave {key} out")


def needs(key: str, switch: str) -> Rule:
    """A key that asks for what another one switches off."""
    what, fix = "{own} needs what {limit}={other} leaves out", "leave {key} out"
    return _pair(key, switch, lambda a, b: a is not None and b is False, what, fix)


def together(key: str, other: str) -> Rule:
    """A key that must be given where another one is."""
    what, fix = "missing beside {limit}={other}", "give both, or neither"
    return _pair(key, other, lambda a, b: a is None and b is not None, what, fix)


def said_once(steps: str, share: str) -> Rule:
    """One length in steps, unless it is negative, and as a share of all steps, unless that is 0."""
    what, fix = "{own} and {limit}={other} say the same thing twice", f"keep {steps} or {share}"
    return _pair(steps, share, lambda a, b: a >= 0 and b > 0, what, fix)


def _pair(key: str, other: str, broken: Numbers, what: str, fix: str, when: Condition = lambda cfg: True) -> Rule:
    def rule(cfg: RunConfig) -> Problem | None:
        mine, theirs = (reduce(getattr, path.split("."), cfg) for path in (key, other))
        if not when(cfg) or not broken(mine, theirs):
            return None
        words = {"key": key, "own": show(mine), "limit": other, "other": show(theirs)}
        return Problem(key, what.format(**words), fix.format(**words))

    return rule
