"""Handles of an engine or sampler on many ranks, with its methods; each rank gets only its own rows."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic

import torch

from tether.batch import RolloutBatch, TokenIds, TrainBatch, WeightUpdate
from tether.execution.transfers import WEIGHTS
from tether.execution.weights import StoredWeights
from tether.execution.worker import Group
from tether.rollout import FinishedResponse, NoiseKey, Responder, SamplingParams, join_rollouts
from tether.training import Forward, LossSpec, Outputs, Updated, UpdatePlan
from tether.training.division import Assign, balance_metrics, balanced, divide, mini_batches
from tether.training.engines.autograd import scattered
from tether.training.engines.shares import join_shares
from tether.training.text import sequence_lengths

WRITE_POLL_SECONDS = 0.1
LINEAR_WORK = 24576
"""Work of a token in the layers, in units of the attention between two tokens: 6 times the hidden size of a 7B model,
as in verl."""


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
    """The methods of `tether.training.protocol.Engine` that do not depend on the kind of batch.

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
        return WeightUpdate(self.version, _OnRanks(self._group, self._component, copy), is_copy=self._copies)

    def save(self, folder: Path) -> None:
        with TemporaryDirectory(dir=folder.parent) as temporary:
            self.saving(folder, Path(temporary) / "state.pt", copy=False)()

    def check_saving(self, folder: Path) -> None:
        self._call("check_saving", [(folder,), *[None] * (self._group.size - 1)])

    @abstractmethod
    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        """Start to save the model and all training state, as `tether.training.protocol.Engine.saving` does."""

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


class ShardedEngine(EngineHandle, Generic[Outputs]):
    """The `tether.training.protocol.Engine` on many ranks, with an `FsdpEngine` or a `MegatronEngine` on each.

    Args:
        group: the ranks.
        component: key of the engine on the ranks.
        replicas: ranks that share their rows.
        assign: assigns rows to replicas.
        copies: as in `EngineHandle`.
    """

    def __init__(
        self, group: Group, component: str, replicas: Replicas, assign: Assign = balanced, *, copies: bool = False
    ) -> None:
        super().__init__(group, component, copies=copies)
        self._replicas, self._assign = replicas, assign

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        assigned = self._assign(_work(batch), len(self._replicas.output_ranks))
        # A rank without rows takes part in the collectives with the first row.
        results = self._call_groups("infer", [(batch[torch.tensor(rows or [0])], forward) for rows in assigned])
        outputs = [(output, torch.tensor(rows)) for output, rows in zip(results, assigned, strict=True) if rows]
        return scattered([output for output, _ in outputs], [rows for _, rows in outputs], len(batch))

    def update(
        self, batch: TrainBatch, loss: LossSpec[TrainBatch, Outputs], plan: UpdatePlan, step: int
    ) -> Updated[Outputs]:
        minis = mini_batches(batch.response_mask, plan, step)
        work = _work(batch)
        shares = divide(minis, work, len(self._replicas.output_ranks), self._assign)
        results = self._call_groups(
            "learn", [(batch[rows], loss, plan, mini_shares, step) for rows, mini_shares in shares]
        )
        self.version += 1
        outputs, row_indices = [], []
        for updated, (rows, mini_shares) in zip(results, shares, strict=True):
            if updated.outputs is not None:
                # Later epochs may assign a row to another rank.
                first = torch.cat([share.rows for share in mini_shares if share.epoch == 0])
                outputs.append(updated.outputs[first])
                row_indices.append(rows[first])
        metrics = results[0].metrics | balance_metrics(minis, shares, sequence_lengths(batch).tolist(), work)
        return Updated(metrics, scattered(outputs, row_indices, len(batch)) if outputs else None)

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        # Each rank writes its shard in a thread of its own.
        parent = folder.with_name(f"parts_of_{folder.name}")
        shards = [parent / str(rank) for rank in range(self._group.size)]
        for shard in shards:
            shard.mkdir(parents=True)
        self._call("begin_saving", [(shard, folder.name) for shard in shards])

        def complete() -> None:
            self._wait_until_written([()] * self._group.size)
            join_shares(shards, folder, state)
            shutil.rmtree(parent)

        return complete

    def _call_groups(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Return the result of each replica, whose ranks all get the same arguments."""
        by_rank = self._call(method, [arguments[replica] for replica in self._replicas.of_rank])
        return [by_rank[rank] for rank in self._replicas.output_ranks]


@dataclass(frozen=True)
class _OnRanks:
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


class ShardedSampler:
    """The `RolloutEngine` of many ranks, with a `RankSampler` on each that samples responses to some of the prompts.

    If a rank cannot sample all of its responses at a time, prompts are split into chunks, and a rank that has finished
    one takes the next. Chunks do not depend on the speed of ranks, so that identical ranks sample identical bits.

    Args:
        group: the ranks.
        component: key of the sampler on the ranks.
        eos_token_ids: tokens that end a response.
        max_num_seqs: responses that a rank samples at a time.
    """

    def __init__(self, group: Group, component: str, eos_token_ids: frozenset[int], max_num_seqs: int) -> None:
        self._group, self._component = group, component
        self.eos_token_ids = eos_token_ids
        self._max_num_seqs = max_num_seqs

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[..., None] | None = None,
        responder: Responder | None = None,
    ) -> RolloutBatch:
        # Responses have one turn, and are reported once all of them are complete.
        assert responder is None, "the configuration refuses conversations on several devices"
        chunks = prompt_chunks(len(prompts), self._group.size, max(1, self._max_num_seqs // sampling.n))
        rollouts = self._chunk_rollouts(
            [(prompts[chunk.start : chunk.stop], sampling, _shifted(key, chunk.start * sampling.n)) for chunk in chunks]
        )
        rollout = join_rollouts(rollouts, [0] * len(rollouts))
        rollout.uid = torch.cat([sampled.uid + chunk.start for sampled, chunk in zip(rollouts, chunks, strict=True)])
        if on_finished is not None:
            for row, (ids, length) in enumerate(zip(rollout.response_ids, rollout.response_length, strict=True)):
                on_finished(FinishedResponse(row, ids[: int(length)].tolist()))
        return rollout

    def _chunk_rollouts(self, arguments: Sequence[tuple[object, ...]]) -> list[RolloutBatch]:
        """Return the responses to each chunk; every rank starts with one and takes the next when it has finished."""
        ranks, waiting = min(self._group.size, len(arguments)), deque(range(len(arguments)))
        firsts = [waiting.popleft() for _ in range(ranks)]
        rollouts: list[Any] = [None] * len(arguments)

        def serve(rank: int) -> None:
            chunk = firsts[rank]
            while True:
                rank_arguments = [arguments[chunk] if other == rank else None for other in range(self._group.size)]
                try:
                    rollouts[chunk] = self._group.call(self._component, "generate", rank_arguments)[rank]
                except BaseException:
                    waiting.clear()
                    raise
                try:
                    chunk = waiting.popleft()
                except IndexError:
                    return

        with ThreadPoolExecutor(ranks) as threads:
            for future in [threads.submit(serve, rank) for rank in range(ranks)]:
                future.result()
        return rollouts

    def load_weights(self, weights: WeightUpdate) -> None:
        # Each rank gathers the shards of the actor on the same ranks, or reads the weights of other ranks.
        if isinstance(weights.tensors, _OnRanks) and weights.tensors.group is not self._group:
            for shared in weights.tensors.shared():
                self._load("load", (weights.version, shared))
        else:
            self._load("refresh", ())

    def _load(self, method: str, arguments: tuple[object, ...]) -> None:
        moved = self._group.call(self._component, method, [arguments] * self._group.size)
        self._group.transfers.add(WEIGHTS, sum(moved))


def prompt_chunks(prompts: int, ranks: int, fitting: int) -> list[range]:
    """Split prompts into chunks that shrink towards the end; the first chunk of a rank is about half of its share.

    Args:
        prompts: number of prompts.
        ranks: number of ranks that sample.
        fitting: prompts whose responses a rank samples at a time. No chunk is smaller, as the rank would be partly
            idle; if it is at least the share of a rank, each rank has one chunk.
    """
    share = -(-prompts // ranks)
    if share <= fitting:
        return [
            range(indices[0], indices[-1] + 1) for indices in torch.arange(prompts).tensor_split(ranks) if len(indices)
        ]
    chunks, first = [], 0
    while first < prompts:
        last = min(prompts, first + max(fitting, (prompts - first) // (2 * ranks)))
        chunks.append(range(first, last))
        first = last
    return chunks


def _shifted(key: NoiseKey, samples: int) -> NoiseKey:
    return NoiseKey(key.seed, key.step, key.first_sample + samples)


def _work(batch: TrainBatch) -> list[float]:
    """Return the work of each row: its tokens in the layers, and pairs of tokens in attention."""
    tokens = sequence_lengths(batch).double()
    work: list[float] = (tokens * (LINEAR_WORK + tokens)).tolist()
    return work
