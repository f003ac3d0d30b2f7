"""Traces of selected training steps, from every process of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import record_function

from tether.runtime.profiling import ProcessTrace

if TYPE_CHECKING:  # it imports transformers, which runs in simulators never need
    from tether.execution import Group


@dataclass(frozen=True)
class StepProfiler:
    """Writes traces to folders ``step_<N>``: ``loop.json.gz`` of this process, ``rank_<R>.json.gz`` of each rank."""

    steps: Collection[int]
    folder: Path
    ranks: Group | None = None
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
