"""Engines and samplers on many ranks behind the interface of a single one; each rank gets only its own rows."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic

import torch

from tether.batch import RolloutBatch, TokenIds, TrainBatch, WeightUpdate
from tether.distributed.handles import EngineHandle, Replicas, WeightsOnRanks
from tether.distributed.transfers import WEIGHTS
from tether.distributed.worker import Group
from tether.loop.engine import Forward, LossSpec, Outputs, UpdatePlan, UpdateResult
from tether.text.learning.engines.local import scattered
from tether.text.learning.engines.shares import join_shares
from tether.text.learning.packing import Assign, balance_metrics, balanced, divide, mini_batches, sequence_lengths
from tether.text.sampling.concat import join_rollouts
from tether.text.sampling.protocol import FinishedResponse, NoiseKey, Responder, SamplingParams

LINEAR_WORK = 24576
"""Cost of a token in the layers, relative to the attention between two tokens: 6 times the hidden size of a 7B model,
as in verl."""


class ShardedEngine(EngineHandle, Generic[Outputs]):
    """The `tether.loop.engine.Engine` on many ranks, with an `FsdpEngine` or a `MegatronEngine` on each."""

    def __init__(
        self, group: Group, component: str, replicas: Replicas, assign: Assign = balanced, *, copies: bool = False
    ) -> None:
        super().__init__(group, component, copies=copies)
        self._replicas, self._assign = replicas, assign

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        assigned = self._assign(_work(batch), len(self._replicas.output_ranks))
        # A rank without rows runs the first row, because it has to take part in the collectives.
        results = self._call_groups("infer", [(batch[torch.tensor(rows or [0])], forward) for rows in assigned])
        outputs = [(output, torch.tensor(rows)) for output, rows in zip(results, assigned, strict=True) if rows]
        return scattered([output for output, _ in outputs], [rows for _, rows in outputs], len(batch))

    def update(
        self, batch: TrainBatch, loss: LossSpec[TrainBatch, Outputs], plan: UpdatePlan, step: int
    ) -> UpdateResult[Outputs]:
        minis = mini_batches(batch.response_mask, plan, step, batch.episode)
        work = _work(batch)
        shares = divide(minis, work, len(self._replicas.output_ranks), self._assign)
        results = self._call_groups(
            "learn", [(batch[rows], loss, plan, mini_shares, step) for rows, mini_shares in shares]
        )
        self.version += 1
        outputs, row_indices = [], []
        for updated, (rows, mini_shares) in zip(results, shares, strict=True):
            if updated.outputs is not None:
                # Later epochs may assign a row to a different rank.
                first = torch.cat([share.rows for share in mini_shares if share.epoch == 0])
                outputs.append(updated.outputs[first])
                row_indices.append(rows[first])
        metrics = results[0].metrics | balance_metrics(minis, shares, sequence_lengths(batch).tolist(), work)
        return UpdateResult(metrics, scattered(outputs, row_indices, len(batch)) if outputs else None)

    def saving(self, folder: Path, state: Path | None, *, copy: bool) -> Callable[[], None]:
        # Each rank writes its shard in a separate thread.
        parent = folder.with_name(f"parts_of_{folder.name}")
        shards = [parent / str(rank) for rank in range(self._group.size)]
        for shard in shards:
            shard.mkdir(parents=True)
        self._call("begin_saving", [(shard, folder.name, state is not None) for shard in shards])

        def complete() -> None:
            self._wait_until_written([()] * self._group.size)
            join_shares(shards, folder, state)
            shutil.rmtree(parent)

        return complete

    def _call_groups(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Return the result of each replica, whose ranks all get the same arguments."""
        by_rank = self._call(method, [arguments[replica] for replica in self._replicas.of_rank])
        return [by_rank[rank] for rank in self._replicas.output_ranks]


class ShardedSampler:
    """A `RolloutEngine` on many ranks: a `RankSampler` on each samples responses to some of the prompts.

    If a rank cannot sample all of its responses at the same time, prompts are split into chunks, and a rank that has
    finished one takes the next. Which prompts form a chunk does not depend on the speed of ranks, so identical ranks
    sample identical bits.
    """

    def __init__(
        self, group: Group, component: str, eos_token_ids: frozenset[int], context: int | None, max_num_seqs: int
    ) -> None:
        self._group, self._component = group, component
        self.eos_token_ids, self.context = eos_token_ids, context
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
        """Return the responses to each chunk; each rank starts with one chunk and takes the next when it has
        finished."""
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
        # Each rank gathers the actor's shards from its own group, or reads weights that ranks of another group stored.
        if isinstance(weights.tensors, WeightsOnRanks) and weights.tensors.group is not self._group:
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
        fitting: prompts whose responses a rank samples at the same time. No chunk is smaller, as the rank would be
            partly idle; if it is at least the share of a rank, each rank has one chunk.
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
    """Return the cost of each row: its tokens in the layers, plus the pairs of tokens in attention."""
    tokens = sequence_lengths(batch).double()
    work: list[float] = (tokens * (LINEAR_WORK + tokens)).tolist()
    return work
