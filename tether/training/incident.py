"""What is kept of an update whose gradient was not finite: enough to replay it elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tether.batch import TrainBatch
from tether.training.protocol import Forward, LossFunction, LossSizes

REPLAY = '''"""Replays the update that was skipped because its gradient was not finite. Run: python replay.py"""

from pathlib import Path

from tether.training.incident import replay

replay(Path(__file__).parent)
'''


def save(folder: Path, model: nn.Module, batch: TrainBatch, forward: Forward[Any], loss: LossFunction[Any]) -> None:
    """Write model, mini-batch, forward and loss to `folder`, with a script that replays them.

    Only the first mini-batch of a training step is kept, since one incident tends to follow the other.
    """
    if folder.exists():
        return
    folder.mkdir(parents=True)
    # The forward holds the model, and both are pickled together so that they stay the same object.
    kept = {"model": model, "rows": len(batch), "batch": batch.to_dict(), "forward": forward, "loss": loss}
    torch.save(kept, folder / "incident.pt")
    (folder / "replay.py").write_text(REPLAY)
    os.sync()


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
