"""What stands for an engine on many ranks in the process of the loop, whatever its batches are."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tether.batch import WeightUpdate
from tether.distributed.weights import StoredWeights
from tether.distributed.worker import Group

WRITE_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Replicas:
    """Ranks that share their rows, and the rank of each replica that returns its outputs."""

    of_rank: tuple[int, ...]
    """Index of the replica of each rank."""
    output_ranks: tuple[int, ...]
    """Rank of each replica that has the model's outputs."""

    @classmethod
    def contiguous(cls, ranks: int, ranks_per_replica: int) -> Replicas:
        """Return replicas of contiguous ranks; the first rank of each has the outputs."""
        return cls(tuple(rank // ranks_per_replica for rank in range(ranks)), tuple(range(0, ranks, ranks_per_replica)))

    @classmethod
    def reported_by(cls, group: Group, component: str) -> Replicas:
        """Return the replicas as reported by the ranks' engines."""
        reports: list[tuple[int, bool]] = group.call(component, "place", [()] * group.size)
        output_ranks = {replica: rank for rank, (replica, has_outputs) in enumerate(reports) if has_outputs}
        return cls(
            tuple(replica for replica, _ in reports), tuple(output_ranks[replica] for replica in sorted(output_ranks))
        )


class EngineHandle(ABC):
    """The methods of `tether.loop.engine.Engine` that do not depend on the kind of batch.

    Args:
        group: the ranks.
        component: key of the engine on the ranks.
        copies: exports a copy of the weights in the object store, which does not change while the engine learns.
    """

    def __init__(self, group: Group, component: str, *, copies: bool = False) -> None:
        self._group, self._component, self._copies = group, component, copies
        self.version = 0

    def export(self) -> WeightUpdate:
        """Return the weights, which stay on the ranks until they are read; `ShardedSampler` uses them there."""
        copy = list(self._group.share_weights(self._component)) if self._copies else None
        return WeightUpdate(self.version, WeightsOnRanks(self._group, self._component, copy), is_copy=self._copies)

    def save(self, folder: Path) -> None:
        self.saving(folder, None, copy=False)()

    def check_saving(self, folder: Path) -> None:
        self._call("check_saving", [(folder,), *[None] * (self._group.size - 1)])

    @abstractmethod
    def saving(self, folder: Path, state: Path | None, *, copy: bool) -> Callable[[], None]:
        """Start to save the model and all training state, as `tether.loop.engine.Engine.saving` does."""

    def _wait_until_written(self, arguments: Sequence[tuple[()] | None]) -> None:
        """Wait for the writing threads of the ranks whose arguments are not None.

        Raises:
            BaseException: the error of a rank that failed to write.
        """
        results: list[tuple[bool, BaseException | None]] = [(False, None)]
        while not all(done for done, _ in results):
            by_rank = self._call("writing", arguments)
            results = [result for result, args in zip(by_rank, arguments, strict=True) if args is not None]
            time.sleep(WRITE_POLL_SECONDS)
        for _, error in results:
            if error is not None:
                raise error

    def load_state(self, file: Path) -> None:
        """Load the training state of a run on any number of ranks."""
        self.version = max(self._call("load_state", [(file,)] * self._group.size))

    def _call(self, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        return self._group.call(self._component, method, arguments)


@dataclass(frozen=True)
class WeightsOnRanks:
    """The weights of ranks, which are transferred in chunks when they are read."""

    group: Group
    component: str
    copy: Sequence[object] | None
    """References to a copy of all weights in the object store; None without one."""

    def shared(self) -> Iterator[object]:
        """Yield references to chunks of the weights, as `Group.share_weights` does."""
        return self.group.share_weights(self.component) if self.copy is None else iter(self.copy)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shared in self.shared():
            stored: StoredWeights = self.group.read(shared)
            yield from stored.update(0).tensors
