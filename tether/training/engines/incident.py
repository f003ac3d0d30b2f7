"""What is kept of an update whose gradient was not finite: enough to replay it elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tether.batch import TrainBatch
from tether.checkpoints.manifest import PARTIAL
from tether.training.protocol import Forward, LossFunction, LossSizes

logger = logging.getLogger(__name__)

REPLAY = '''"""Replays the update that was skipped because its gradient was not finite. Run: python replay.py"""

from pathlib import Path

from tether.training.engines.incident import replay

replay(Path(__file__).parent)
'''


def save(folder: Path, model: nn.Module, batch: TrainBatch, forward: Forward[Any], loss: LossFunction[Any]) -> None:
    """Write model, mini-batch, forward and loss to `folder`, with a script that replays them.

    A folder of that name is replaced once the new one is complete. A failure is a warning: the update is skipped either
    way, and the run goes on.
    """
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    # The forward holds the model, and both are pickled together so that they stay the same object.
    kept = {"model": model, "rows": len(batch), "batch": batch.to_dict(), "forward": forward, "loss": loss}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / "incident.pt").open("wb") as file:
            torch.save(kept, file)
            os.fsync(file.fileno())
        (partial / "replay.py").write_text(REPLAY)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except Exception as error:  # noqa: BLE001  a full disk, a model that cannot be pickled: neither may end the run
        shutil.rmtree(partial, ignore_errors=True)
        logger.warning("%s: the skipped update could not be kept (%s: %s)", folder, type(error).__name__, error)


def replay(folder: Path) -> list[int]:
    """Run the mini-batch row by row and print which rows have a non-finite output, loss or gradient.

    Returns:
        The numbers of those rows.
    """
    kept = torch.load(folder / "incident.pt", weights_only=False)
    model, forward, loss = kept["model"], kept["forward"], kept["loss"]
    batch = TrainBatch.from_dict(kept["batch"], batch_size=[kept["rows"]])
    return [row for row in range(len(batch)) if not _row_is_finite(model, batch[row : row + 1], forward, loss, row)]


def _row_is_finite(
    model: nn.Module, row: TrainBatch, forward: Forward[Any], loss: LossFunction[Any], number: int
) -> bool:
    model.zero_grad()
    term = loss(forward(row), row, LossSizes(int(row.response_mask.sum()), 1))
    term.loss.backward()
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, norm in norms.items() if not torch.isfinite(norm)]
    print(
        f"row {number}: loss {float(term.loss.detach()):.6g}, {len(bad)} of {len(norms)} gradients not finite {bad[:3]}"
    )
    return not bad and bool(torch.isfinite(term.loss))
