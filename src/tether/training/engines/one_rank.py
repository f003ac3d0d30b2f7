"""A model that has one of a run's devices to itself: nothing of it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from tether.training.engines.copies import with_all_names
from tether.training.engines.local import LocalEngine
from tether.training.engines.ranks import or_smaller_next_time
from tether.training.engines.shares import Writing
from tether.training.protocol import Outputs
from tether.training.text.micro_batches import MicroBatching, RowSize

Result = TypeVar("Result")


class OneRankEngine(LocalEngine[Outputs]):
    """`LocalEngine` with the methods that each of several ranks has: FSDP would copy all weights for every pass."""

    @cached_property
    def _writing(self) -> Writing:
        return Writing()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `export`, in the memory of the host; tied ones follow each other."""
        for names, value in with_all_names(self.model):
            found = value.cpu()
            yield from ((name, found) for name in names)

    def begin_saving(self, part: Path, name: str) -> None:
        """Copy the model and its training state, and begin to write them; see `FsdpEngine.begin_saving`."""
        self._writing.begin(self.saving(part / name, part / "state.pt", copy=True))

    def writing(self) -> tuple[bool, BaseException | None]:
        """Whether all is written, and how that failed."""
        return self._writing.answer()

    def load_state(self, file: Path) -> int:  # type: ignore[override]
        """See `LocalEngine.load_state`; returns the version."""
        super().load_state(file)
        return self.version

    def _within_memory(
        self, attempt: Callable[[MicroBatching], Result], micro: MicroBatching, rows: Sequence[RowSize]
    ) -> Result:
        return or_smaller_next_time(attempt, micro, rows)
