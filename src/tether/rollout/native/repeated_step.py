"""A decoding step that the device records when it comes the second time, and runs again from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tether.kernels import Recording, Reference

Result = TypeVar("Result")


class RepeatedStep:
    """Calls the step of one generation, or runs again what it had the device do.

    The first step on other memory is called, which lets kernels choose their algorithms; the second is recorded. The
    result of a step that was run again lies where that of the step before lay.

    Args:
        kernels: of the model's device and dtype; where they capture nothing, no step has a memory that is given.
    """

    def __init__(self, kernels: Reference) -> None:
        self._kernels = kernels
        self._memory: tuple[int, ...] = ()
        self._recorded: tuple[Any, Recording] | None = None

    def __call__(self, memory: tuple[int, ...], step: Callable[[], Result]) -> Result:
        """The result of the step.

        Args:
            memory: while it is the same, the step reads and writes the same places; empty: it does not.
            step: what to call.
        """
        if not memory or memory != self._memory:
            self._memory, self._recorded = memory, None
            return step()
        if self._recorded is None:
            self._recorded = self._kernels.capture(step)
        result, recording = self._recorded
        recording.run()
        return result
