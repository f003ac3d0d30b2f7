"""Callbacks: user-defined objects that are notified of each step, evaluation and checkpoint."""

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
"""Arguments of each callback method."""


class Callbacks:
    """Calls the methods of `HOOKS` that objects have, in the order of the objects.

    An exception of a callback ends the run, after a checkpoint of the finished step.

    Args:
        objects: objects with at least one of the methods each.

    Raises:
        ValueError: an object has none of the methods, or a method with an unknown name or wrong arguments.
    """

    def __init__(self, objects: Sequence[object] = ()) -> None:
        for index, callback in enumerate(objects):
            _check(callback, f"callbacks[{index}] ({type(callback).__name__})")
        self._objects = tuple(objects)

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notify that a step, including its evaluation and log, is done; `metrics` has everything that it measured."""
        self._call("on_step_end", step, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notify that the policy was evaluated after a step; 0 is before the first step."""
        self._call("on_evaluation", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Notify that a checkpoint was written."""
        self._call("on_checkpoint", step, path)

    def _call(self, hook: str, step: int, argument: Mapping[str, float] | Path) -> None:
        for callback in self._objects:
            if method := getattr(callback, hook, None):
                method(step, argument if isinstance(argument, Path) else dict(argument))


def _check(callback: object, name: str) -> None:
    hooks = [hook for hook in dir(callback) if hook.startswith("on_") and callable(getattr(callback, hook, None))]
    for hook in hooks:
        if hook not in HOOKS:
            raise ValueError(f"{name}: {hook} is never called.{did_you_mean(hook, HOOKS)} Hooks: {', '.join(HOOKS)}")
        try:
            signature = inspect.signature(getattr(callback, hook))
            signature.bind(*HOOKS[hook])
        except TypeError:
            raise ValueError(f"{name}: {hook}{signature} is called as {hook}({', '.join(HOOKS[hook])})") from None
    if not hooks:
        raise ValueError(f"{name}: has none of the methods {', '.join(HOOKS)}")
