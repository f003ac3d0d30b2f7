"""Stands for an engine on many ranks: it has the engine's methods, and sends each rank its rows only."""

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

_WRITE_LOOK_SECONDS = 0.1
LINEAR = 24576
"""Work of a token in the layers, in units of one token that another looks at: 6 times the hidden width of a 7B model
(verl's figure)."""


@dataclass(frozen=True)
class Replicas:
    """Which ranks share their rows, and which of them answers."""

    of: tuple[int, ...]
    """Of each rank the number of its replica."""
    speakers: tuple[int, ...]
    """Of each replica the rank that has the model's outputs."""

    @classmethod
    def in_a_row(cls, ranks: int, each: int) -> Replicas:
        """Of so many ranks that follow one another; the first of them answers."""
        return cls(tuple(rank // each for rank in range(ranks)), tuple(range(0, ranks, each)))

    @classmethod
    def asked(cls, group: Group, part: str) -> Replicas:
        """As the ranks themselves know: each says its replica, and whether it answers for it."""
        places: list[tuple[int, bool]] = group.call(part, "place", [()] * group.size)
        speakers = {replica: rank for rank, (replica, speaks) in enumerate(places) if speaks}
        return cls(tuple(replica for replica, _ in places), tuple(speakers[number] for number in sorted(speakers)))


class EngineHandle(ABC):
    """The methods of `tether.training.protocol.Engine` that do not depend on the kind of batch.

    Args:
        group: the ranks.
        part: what the engine is called there.
        copies: export a copy of the weights, in the object store, which stays as it is while the engine learns.
    """

    def __init__(self, group: Group, part: str, *, copies: bool = False) -> None:
        self._group, self._part, self._copies = group, part, copies
        self.version = 0

    def export(self) -> WeightUpdate:
        """The weights; they stay on the ranks, where `ShardedSampler` takes them over, until somebody reads them."""
        copy = list(self._group.share_weights(self._part)) if self._copies else None
        return WeightUpdate(self.version, _OnRanks(self._group, self._part, copy), is_copy=self._copies)

    def save(self, folder: Path) -> None:
        """See `tether.training.protocol.Engine.save`."""
        with TemporaryDirectory(dir=folder.parent) as beside:
            self.saving(folder, Path(beside) / "state.pt", copy=False)()

    def check_saving(self, folder: Path) -> None:
        """See `tether.training.protocol.Engine.check_saving`."""
        self._call("check_saving", [(folder,), *[None] * (self._group.size - 1)])

    @abstractmethod
    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        """See `tether.training.protocol.Engine.saving`."""

    def _until_written(self, arguments: Sequence[tuple[()] | None]) -> None:
        """Wait for the threads of the ranks that write, which are those that have arguments.

        Raises:
            BaseException: the error of a rank that cannot write.
        """
        answers: list[tuple[bool, BaseException | None]] = [(False, None)]
        while not all(done for done, _ in answers):
            every = self._call("writing", arguments)
            answers = [answer for answer, given in zip(every, arguments, strict=True) if given is not None]
            time.sleep(_WRITE_LOOK_SECONDS)
        for _, error in answers:
            if error is not None:
                raise error

    def load_state(self, file: Path) -> None:
        """See `tether.training.protocol.Engine.load_state`; of any number of ranks."""
        self.version = max(self._call("load_state", [(file,)] * self._group.size))

    def _call(self, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        return self._group.call(self._part, method, arguments)


class ShardedEngine(EngineHandle, Generic[Outputs]):
    """Stands for the `FsdpEngine` or `MegatronEngine` of each rank; see `tether.training.protocol.Engine`.

    Args:
        group: the ranks.
        part: what the engine is called there.
        replicas: ranks that share their rows.
        assign: which replica gets which rows.
        copies: see `EngineHandle`.
    """

    def __init__(
        self, group: Group, part: str, replicas: Replicas, assign: Assign = balanced, *, copies: bool = False
    ) -> None:
        super().__init__(group, part, copies=copies)
        self._replicas, self._assign = replicas, assign

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        """See `tether.training.protocol.Engine.infer`."""
        dealt = self._assign(_work(batch), len(self._replicas.speakers))
        # A rank without rows runs along on one that is another's.
        found = self._call_groups("infer", [(batch[torch.tensor(rows or [0])], forward) for rows in dealt])
        answers = [(answer, torch.tensor(rows)) for answer, rows in zip(found, dealt, strict=True) if rows]
        return scattered([answer for answer, _ in answers], [rows for _, rows in answers], len(batch))

    def update(
        self, batch: TrainBatch, loss: LossSpec[TrainBatch, Outputs], plan: UpdatePlan, step: int
    ) -> Updated[Outputs]:
        """See `tether.training.protocol.Engine.update`."""
        minis = mini_batches(batch.response_mask, plan, step)
        work = _work(batch)
        shares = divide(minis, work, len(self._replicas.speakers), self._assign)
        found = self._call_groups("learn", [(batch[rows], loss, plan, parts, step) for rows, parts in shares])
        self.version += 1
        outputs, places = [], []
        for updated, (rows, parts) in zip(found, shares, strict=True):
            if updated.outputs is not None:
                first = torch.cat([part.rows for part in parts if part.epoch == 0])  # later a row may be elsewhere
                outputs.append(updated.outputs[first])
                places.append(rows[first])
        metrics = found[0].metrics | balance_metrics(minis, shares, sequence_lengths(batch).tolist(), work)
        return Updated(metrics, scattered(outputs, places, len(batch)) if outputs else None)

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        """See `tether.training.protocol.Engine.saving`; each rank writes a part, in a thread of its own."""
        together = folder.with_name(f"parts_of_{folder.name}")
        parts = [together / str(rank) for rank in range(self._group.size)]
        for part in parts:
            part.mkdir(parents=True)
        self._call("begin_saving", [(part, folder.name) for part in parts])

        def complete() -> None:
            self._until_written([()] * self._group.size)
            join_shares(parts, folder, state)
            shutil.rmtree(together)

        return complete

    def _call_groups(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """The answer of each replica, whose ranks all get the same."""
        every = self._call(method, [arguments[replica] for replica in self._replicas.of])
        return [every[rank] for rank in self._replicas.speakers]


@dataclass(frozen=True)
class _OnRanks:
    """The weights of ranks, which travel only when they are read, some at a time."""

    group: Group
    part: str
    copy: Sequence[object] | None
    """Of all weights, in the object store."""

    def shared(self) -> Iterator[object]:
        """See `Group.share_weights`."""
        return self.group.share_weights(self.part) if self.copy is None else iter(self.copy)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shared in self.shared():
            stored: StoredWeights = self.group.read(shared)
            yield from stored.update(0).tensors


class ShardedSampler:
    """Stands for a `RankSampler` on each rank, which draws for some of the prompts; see `RolloutEngine`.

    Where a rank cannot sample all of its responses at a time, prompts are dealt in pieces, and a rank that is done
    takes the next one. Pieces do not depend on who is faster, so that ranks that compute alike draw the same bits.

    Args:
        group: the ranks.
        part: what the sampler is called there.
        eos_token_ids: tokens that end a response.
        max_num_seqs: responses that a rank samples at a time.
    """

    def __init__(self, group: Group, part: str, eos_token_ids: frozenset[int], max_num_seqs: int) -> None:
        self._group, self._part = group, part
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
        """See `RolloutEngine.generate`; responses are reported once all are complete, and have one turn."""
        assert responder is None, "the configuration refuses conversations on several devices"
        dealt = pieces(len(prompts), self._group.size, max(1, self._max_num_seqs // sampling.n))
        answers = self._answers(
            [(prompts[part.start : part.stop], sampling, _from(key, part.start * sampling.n)) for part in dealt]
        )
        rollout = join_rollouts(answers, [0] * len(answers))
        rollout.uid = torch.cat([answer.uid + part.start for answer, part in zip(answers, dealt, strict=True)])
        if on_finished is not None:
            for row, (ids, length) in enumerate(zip(rollout.response_ids, rollout.response_length, strict=True)):
                on_finished(FinishedResponse(row, ids[: int(length)].tolist()))
        return rollout

    def _answers(self, asked: Sequence[tuple[object, ...]]) -> list[RolloutBatch]:
        """The answer to each piece: every rank begins with one, and takes the next that is left when it is done."""
        ranks, left = min(self._group.size, len(asked)), deque(range(len(asked)))
        firsts = [left.popleft() for _ in range(ranks)]
        answers: list[Any] = [None] * len(asked)

        def serve(rank: int) -> None:
            piece = firsts[rank]
            while True:
                arguments = [asked[piece] if other == rank else None for other in range(self._group.size)]
                try:
                    answers[piece] = self._group.call(self._part, "generate", arguments)[rank]
                except BaseException:
                    left.clear()
                    raise
                try:
                    piece = left.popleft()
                except IndexError:
                    return

        with ThreadPoolExecutor(ranks) as threads:
            for served in [threads.submit(serve, rank) for rank in range(ranks)]:
                served.result()
        return answers

    def load_weights(self, weights: WeightUpdate) -> None:
        """See `RolloutEngine.load_weights`; each rank puts the actor's shards together, or reads those of others."""
        if isinstance(weights.tensors, _OnRanks) and weights.tensors.group is not self._group:
            for shared in weights.tensors.shared():
                self._load("load", (weights.version, shared))
        else:
            self._load("refresh", ())

    def _load(self, method: str, arguments: tuple[object, ...]) -> None:
        moved = self._group.call(self._part, method, [arguments] * self._group.size)
        self._group.transfers.add(WEIGHTS, sum(moved))


def pieces(prompts: int, ranks: int, fitting: int) -> list[range]:
    """Prompts in pieces that are smaller towards the end, the first of each rank about half of its share.

    Args:
        prompts: their number.
        ranks: that draw for them.
        fitting: prompts whose responses a rank samples at a time. No piece is smaller, as the rank would idle; where
            that is a whole share, each rank has one piece.
    """
    share = -(-prompts // ranks)
    if share <= fitting:
        return [range(part[0], part[-1] + 1) for part in torch.arange(prompts).tensor_split(ranks) if len(part)]
    dealt, first = [], 0
    while first < prompts:
        last = min(prompts, first + max(fitting, (prompts - first) // (2 * ranks)))
        dealt.append(range(first, last))
        first = last
    return dealt


def _from(key: NoiseKey, samples: int) -> NoiseKey:
    return NoiseKey(key.seed, key.step, key.first_sample + samples)


def _work(batch: TrainBatch) -> list[float]:
    """Cost of each row: its tokens in the layers, and their pairs in attention."""
    tokens = sequence_lengths(batch).double()
    work: list[float] = (tokens * (LINEAR + tokens)).tolist()
    return work
