"""An engine for a model on a single device of a run with several devices, without sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from tether.loop.engine import Outputs
from tether.loop.rank_exchange import BackgroundWriter
from tether.text.learning.engines.copies import with_all_names
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.engines.ranks import run_or_report_too_large
from tether.text.learning.packing import MicroBatching, RowSize

Result = TypeVar("Result")


class OneRankEngine(LocalEngine[Outputs]):
    """A `LocalEngine` with the interface of engines on ranks; FSDP would copy all weights for every pass."""

    @cached_property
    def _writing(self) -> BackgroundWriter:
        return BackgroundWriter()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `export` on the CPU; tied ones are adjacent."""
        for names, value in with_all_names(self.model):
            tensor = value.cpu()
            yield from ((name, tensor) for name in names)

    def begin_saving(self, share: Path, name: str, with_state: bool = True) -> None:
        """Copy the model and its training state and start writing them, as `FsdpEngine.begin_saving` does."""
        self._writing.begin(self.saving(share / name, share / "state.pt" if with_state else None, copy=True))

    def writing(self) -> tuple[bool, BaseException | None]:
        """Return whether writing is done, and the error if it failed."""
        return self._writing.answer()

    def load_state(self, file: Path) -> int:  # type: ignore[override]
        super().load_state(file)
        return self.version

    def _retry_if_out_of_memory(
        self, attempt: Callable[[MicroBatching], Result], micro: MicroBatching, rows: Sequence[RowSize]
    ) -> Result:
        return run_or_report_too_large(attempt, micro, rows)
