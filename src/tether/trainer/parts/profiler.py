"""Traces of some training steps, of every process that takes part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import record_function

from tether.runtime.profiling import ProcessTrace

if TYPE_CHECKING:  # it loads transformers, which runs in simulators never need
    from tether.execution import Group


@dataclass(frozen=True)
class StepProfiler:
    """Records steps into ``step_<N>`` of a folder: ``loop.json.gz`` is this process, ``rank_<R>.json.gz`` a rank."""

    steps: Collection[int]
    folder: Path
    ranks: Group | None = None
    """Each has a `ProcessTrace` as its part ``trace``; None: this process is all."""

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record what happens inside if the step is one of those; one that fails leaves no trace."""
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
