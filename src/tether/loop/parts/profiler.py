"""Traces of selected training steps, from every process of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import record_function

from tether.runtime.profiling import ProcessTrace


class Ranks(Protocol):
    """The processes of a run on several devices, as `tether.distributed.Group` is."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def call(self, component: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """Call a method of a component on all ranks at once."""
        ...


@dataclass(frozen=True)
class StepProfiler:
    """Writes traces to folders ``step_<N>``: ``loop.json.gz`` of this process, ``rank_<R>.json.gz`` of each rank."""

    steps: Collection[int]
    folder: Path
    ranks: Ranks | None = None
    """The ranks, each with a `ProcessTrace` named ``trace``; None if there is only this process."""

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Trace the block if the step is selected; a step that fails writes no trace."""
        if step not in self.steps:
            yield
            return
        folder, trace, file = self.folder / f"step_{step}", ProcessTrace(), None
        trace.start()
        try:
            if self.ranks:
                self.ranks.call("trace", "start", [()] * self.ranks.size)
            with record_function(f"step {step}"):
                yield
            if self.ranks:
                files = [folder / f"rank_{rank}.json.gz" for rank in range(self.ranks.size)]
                self.ranks.call("trace", "write", [(file,) for file in files])
            file = folder / "loop.json.gz"
        finally:
            trace.write(file)
