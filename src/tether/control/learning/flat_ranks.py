"""A control policy on several ranks: each rank has all weights and computes some of the rows.

The observations of a row are on one rank, which runs the networks on them; all other fields are on every rank. The
networks' outputs for a mini-batch are gathered before the loss, so that its denominators, its selection of elements and
its metrics are those of one process. Only the gradients of weights are summed over ranks, in another order than in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tether.control.learning.flat import SMALLER, FlatEngine
from tether.control.learning.losses import ControlLoss, Draws, Samples
from tether.control.policies import Observations
from tether.loop.engines.collectives import from_all
from tether.loop.engines.out_of_memory import MicroBatchTooLarge, OutOfMemory, named_out_of_memory
from tether.loop.engines.protocol import AnyLoss, Updated, UpdatePlan
from tether.loop.engines.writing import Writing

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
Result = TypeVar("Result")


class FlatRankEngine(FlatEngine):
    """The engine of one rank; `learn` is called on all ranks with the same arguments. See `FlatEngine` for the
    arguments.

    The weights are broadcast from rank 0.
    """

    _seen: Observations
    """Observations of the rows of this rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._writing = Writing()
        dist.broadcast(self._flat.values, 0)
        for buffer in self.policy.buffers():
            dist.broadcast(buffer, 0)

    def learn(self, rows: Samples, seen: Observations, loss: AnyLoss, plan: UpdatePlan, step: int) -> Updated[Any]:
        """Update the policy as `Engine.update` describes.

        Args:
            rows: rows of the rollout; each has the index of its observation in `seen` instead of the observation, or -1
                if it is on another rank.
            seen: the observations of this rank's rows.
            loss: the loss to minimise.
            plan: epochs and mini-batches.
            step: the training step.
        """
        self._seen = seen.to(self._device)
        return self.update(rows, loss, plan, step)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights on the CPU; every rank has them."""
        return ((name, value.detach().cpu()) for name, value in self.export().tensors)

    def begin_saving(self, folder: Path, state: Path) -> None:
        """Write the policy and its optimizer's state in a thread; they are the same on all ranks."""
        self._writing.begin(self.saving(folder, state, copy=True))

    def writing(self) -> tuple[bool, BaseException | None]:
        """Return whether writing is done, and the error if it failed."""
        return self._writing.answer()

    def load_state(self, file: Path) -> int:  # type: ignore[override]
        super().load_state(file)
        return self.version

    def _within_memory(self, attempt: Callable[[], Result], rows: int) -> Result:
        limit = self.policy.micro_batch or rows
        try:
            with named_out_of_memory(f"a forward or backward pass with {MICRO_BATCH}={limit}", SMALLER):
                return attempt()
        except OutOfMemory as error:
            if limit <= 1:
                raise
            raise MicroBatchTooLarge(str(error), (MICRO_BATCH, limit // 2)) from None

    def _mine(self, rows: Samples) -> Samples:
        indices, is_local = rows.obs, self._local_rows(rows)
        return replace(rows[is_local], obs=self._seen[indices[is_local]])

    def _of_all(self, rows: Samples, values: Tensor) -> Tensor:
        is_local = self._local_decisions(rows)
        gathered = values.new_zeros(len(is_local), *values.shape[1:])
        gathered[is_local] = values
        dist.all_reduce(gathered)  # the other ranks have zeros there
        return gathered

    def _of_mine(self, rows: Samples, values: Tensor) -> Tensor:
        is_local = self._local_decisions(rows)
        return values[is_local] if len(values) == len(is_local) else values

    def _finish_gradients(self) -> None:
        dist.all_reduce(self._flat.grads)

    def _norm_of_all(self, matrix: Tensor) -> Tensor:
        square = matrix.square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def _keep_incident(self, step: int, loss: ControlLoss, mini: Samples, draws: Draws) -> None:
        shares = from_all((self._local_rows(mini).cpu(), self._mine(mini).obs.cpu()))
        if dist.get_rank() > 0:
            return
        order = torch.cat([is_local.nonzero().squeeze(1) for is_local, _ in shares]).argsort()
        obs = torch.cat([seen for _, seen in shares])[order].to(self._device)
        super()._keep_incident(step, loss, replace(mini, obs=obs), draws)

    def _local_rows(self, rows: Samples) -> Tensor:
        """Return [rows]: whose observations are on this rank."""
        assert isinstance(rows.obs, Tensor)
        return rows.obs >= 0

    def _local_decisions(self, rows: Samples) -> Tensor:
        """Return [decisions]: whose observations are on this rank."""
        is_local = self._local_rows(rows)
        return (
            is_local if rows.memory is None else is_local[:, None].expand_as(rows.memory.selected)[rows.memory.selected]
        )
