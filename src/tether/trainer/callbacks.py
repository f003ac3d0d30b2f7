"""Callbacks: objects of the user's that are told of each step, evaluation and checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from tether.spelling import did_you_mean

HOOKS: Mapping[str, tuple[str, ...]] = {
    "on_step_end": ("step", "metrics"),
    "on_evaluation": ("step", "metrics"),
    "on_checkpoint": ("step", "path"),
}
"""Method -> its arguments."""


class Callbacks:
    """Calls the methods of `HOOKS` that objects have, in the order of the objects.

    What a callback raises ends the run, after a checkpoint of the step that is done.

    Args:
        objects: each with one of the methods or more.

    Raises:
        ValueError: an object has none of them, one named almost so, or one that does not take its arguments.
    """

    def __init__(self, objects: Sequence[object] = ()) -> None:
        for number, one in enumerate(objects):
            _check(one, f"callbacks[{number}] ({type(one).__name__})")
        self._objects = tuple(objects)

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, and was tested and logged where that was due; `metrics` is all that was measured of it."""
        self._call("on_step_end", step, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy was tested after a step; 0: before the first."""
        self._call("on_evaluation", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint was written."""
        self._call("on_checkpoint", step, path)

    def _call(self, hook: str, step: int, what: Mapping[str, float] | Path) -> None:
        for one in self._objects:
            if method := getattr(one, hook, None):
                method(step, what if isinstance(what, Path) else dict(what))


def _check(one: object, name: str) -> None:
    found = [hook for hook in dir(one) if hook.startswith("on_") and callable(getattr(one, hook, None))]
    for hook in found:
        if hook not in HOOKS:
            raise ValueError(f"{name}: {hook} is never called.{did_you_mean(hook, HOOKS)} Hooks: {', '.join(HOOKS)}")
        try:
            signature = inspect.signature(getattr(one, hook))
            signature.bind(*HOOKS[hook])
        except TypeError:
            raise ValueError(f"{name}: {hook}{signature} is called as {hook}({', '.join(HOOKS[hook])})") from None
    if not found:
        raise ValueError(f"{name}: has none of the methods {', '.join(HOOKS)}")
