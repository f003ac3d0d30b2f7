"""Records of updates whose gradient was not finite, from which they can be replayed elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from tether.checkpoints import PARTIAL

logger = logging.getLogger(__name__)

REPLAY = '''"""Replays the update that was skipped because its gradient was not finite. Run: python replay.py"""

from pathlib import Path

from tether.loop.incident import replay

replay(Path(__file__).parent)
'''


class SkippedUpdate(Protocol):
    """A mini-batch whose gradient was not finite, pickled with everything that its gradient depends on."""

    def __len__(self) -> int: ...

    def backward(self, row: int) -> Tensor:
        """Write the gradient of one row's loss into every parameter's ``grad``, and return the loss."""
        ...


class Incidents:
    """Saves the first skipped update of each training step; further ones of that step usually have the same cause.

    Args:
        folder: where to save them; None saves nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._last: int | None = None

    def keep(self, step: int, model: nn.Module, update: SkippedUpdate) -> None:
        """Save the update of training step `step`, counted from 0, unless one of that step is saved already."""
        if self._folder is not None and self._last != step:
            self._last = step
            save(self._folder / f"step_{step + 1}", model, update)


def save(folder: Path, model: nn.Module, update: SkippedUpdate) -> None:
    """Save a model and its skipped update to `folder`, with a script that replays them.

    An existing folder is replaced once the new one is complete. A failure is logged as a warning, since the run can
    continue without the record.
    """
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    # The update refers to the model; pickling both together preserves that reference.
    record = {"model": model, "update": update}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / "incident.pt").open("wb") as file:
            torch.save(record, file)
            os.fsync(file.fileno())
        (partial / "replay.py").write_text(REPLAY)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except Exception as error:  # noqa: BLE001  a full disk or an unpicklable model must not end the run
        shutil.rmtree(partial, ignore_errors=True)
        logger.warning("%s: the skipped update could not be kept (%s: %s)", folder, type(error).__name__, error)


def replay(folder: Path) -> list[int]:
    """Run the mini-batch row by row, and print which rows have a non-finite loss or gradient.

    Returns:
        The indices of those rows.
    """
    record = torch.load(folder / "incident.pt", weights_only=False)
    model, update = record["model"], record["update"]
    return [row for row in range(len(update)) if not _row_is_finite(model, update, row)]


def _row_is_finite(model: nn.Module, update: SkippedUpdate, row: int) -> bool:
    loss = update.backward(row)
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, norm in norms.items() if not torch.isfinite(norm)]
    print(f"row {row}: loss {float(loss):.6g}, {len(bad)} of {len(norms)} gradients not finite {bad[:3]}")
    return not bad and bool(torch.isfinite(loss))
