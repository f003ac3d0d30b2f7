"""A decoding step that the device records at its second repetition and replays afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tether.kernels import RecordedKernels, Reference

Result = TypeVar("Result")


class RepeatedStep:
    """Calls a step of a generation, or replays its recording.

    The first step on other memory is called normally, so that kernels choose their algorithms; the second is recorded.
    A replayed step overwrites the result of the previous step.

    Args:
        kernels: backend of the model's device and dtype; callers pass an empty `memory` if it captures nothing.
    """

    def __init__(self, kernels: Reference) -> None:
        self._kernels = kernels
        self._memory: tuple[int, ...] = ()
        self._recorded: tuple[Any, RecordedKernels] | None = None

    def __call__(self, memory: tuple[int, ...], step: Callable[[], Result]) -> Result:
        """Return the result of the step.

        Args:
            memory: identifies the memory that the step uses; empty: the memory is not fixed.
            step: the function to call.
        """
        if not memory or memory != self._memory:
            self._memory, self._recorded = memory, None
            return step()
        if self._recorded is None:
            self._recorded = self._kernels.capture(step)
        result, recording = self._recorded
        recording.run()
        return result
