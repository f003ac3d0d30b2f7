"""A control policy on several ranks: each has all of its weights, and learns from some of the rows.

The observations of a row are on one rank, which passes them through the networks; everything else about it is on all of
them. What the networks said of a mini-batch is put together before the loss, so that its denominators, its choices and
its metrics are those of one process. Only gradients of weights are sums over ranks, in another order than there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tether.models.control import Observations
from tether.training.control.closed_form_gradients import Draws
from tether.training.control.losses import ControlLoss
from tether.training.control.samples import Samples
from tether.training.engines.flat import SMALLER, FlatEngine
from tether.training.engines.ranks import from_all
from tether.training.engines.shares import Writing
from tether.training.out_of_memory import MicroBatchTooLarge, OutOfMemory, named_out_of_memory
from tether.training.protocol import AnyLoss, Updated, UpdatePlan

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
Result = TypeVar("Result")


class FlatRankEngine(FlatEngine):
    """One rank's share; `learn` is called on all ranks alike. For the arguments see `FlatEngine`.

    The weights are those of rank 0.
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
        """See `Engine.update`.

        Args:
            rows: of the rollout; in the place of the observations of each is its number in `seen`, -1 for those of
                other ranks.
            seen: observations of this rank's rows.
            loss: what is lowered.
            plan: epochs and mini-batches.
            step: see there.
        """
        self._seen = seen.to(self._device)
        return self.update(rows, loss, plan, step)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, on the host; every rank has them."""
        return ((name, value.detach().cpu()) for name, value in self.export().tensors)

    def begin_saving(self, folder: Path, state: Path) -> None:
        """Write the policy, and its optimizer's state beside it, in a thread; all ranks have the same."""
        self._writing.begin(self.saving(folder, state, copy=True))

    def writing(self) -> tuple[bool, BaseException | None]:
        """Whether that is done, and how it failed."""
        return self._writing.answer()

    def load_state(self, file: Path) -> int:  # type: ignore[override]
        """See `FlatEngine.load_state`; returns the version."""
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
        numbers, here = rows.obs, self._rows_here(rows)
        return replace(rows[here], obs=self._seen[numbers[here]])

    def _of_all(self, rows: Samples, found: Tensor) -> Tensor:
        here = self._decisions_here(rows)
        whole = found.new_zeros(len(here), *found.shape[1:])
        whole[here] = found
        dist.all_reduce(whole)  # the others have zeros there
        return whole

    def _of_mine(self, rows: Samples, found: Tensor) -> Tensor:
        here = self._decisions_here(rows)
        return found[here] if len(found) == len(here) else found

    def _finish_gradients(self) -> None:
        dist.all_reduce(self._flat.grads)

    def _norm_of_all(self, found: Tensor) -> Tensor:
        square = found.square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def _keep_incident(self, step: int, loss: ControlLoss, mini: Samples, draws: Draws) -> None:
        pieces = from_all((self._rows_here(mini).cpu(), self._mine(mini).obs.cpu()))
        if dist.get_rank() > 0:
            return
        order = torch.cat([here.nonzero().squeeze(1) for here, _ in pieces]).argsort()
        obs = torch.cat([seen for _, seen in pieces])[order].to(self._device)
        super()._keep_incident(step, loss, replace(mini, obs=obs), draws)

    def _rows_here(self, rows: Samples) -> Tensor:
        """[rows] whose observations are on this rank."""
        assert isinstance(rows.obs, Tensor)
        return rows.obs >= 0

    def _decisions_here(self, rows: Samples) -> Tensor:
        """[decisions] of them."""
        here = self._rows_here(rows)
        return here if rows.memory is None else here[:, None].expand_as(rows.memory.kept)[rows.memory.kept]
