"""Weights travel in parts: all of them with their bits, tied ones once, the next part while one is read."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny import tiny_model
from tether.batch import WeightUpdate
from tether.distributed import StoredWeights, Transfers
from tether.distributed.handles import EngineHandle
from tether.distributed.weights import weight_chunks
from tether.text.sharded import ShardedSampler

WEIGHTS = [("one", torch.ones(2)), ("two", torch.full((2,), 2.0)), ("three", torch.full((2,), 3.0))]


@given(sizes=st.lists(st.integers(0, 9), max_size=12), limit=st.integers(1, 40))
def test_parts_are_as_small_as_they_may_be(sizes: list[int], limit: int) -> None:
    """Every tensor is in one; without its last, a part is below the limit."""
    tensors = [(str(number), torch.zeros(size)) for number, size in enumerate(sizes)]
    found = list(weight_chunks(tensors, limit))
    assert [name for part, _ in found for name, _ in part] == [name for name, _ in tensors]
    assert [more for _, more in found] == [True] * (len(found) - 1) + [False]
    for part, more in found:
        held = [4 * len(value) for _, value in part]
        assert sum(held[:-1]) < limit
        assert sum(held) >= limit or not more


def test_other_names_of_a_tensor_are_in_its_part_and_its_bytes_travel_once() -> None:
    tied = torch.ones(4)
    tensors = [("a", tied), ("b", tied), ("c", torch.ones(4)), ("d", torch.ones(4))]
    parts = [part for part, _ in weight_chunks(tensors, 16)]
    assert [[name for name, _ in part] for part in parts] == [["a", "b"], ["c"], ["d"]]
    assert [StoredWeights.of(part).nbytes for part in parts] == [16, 16, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_has_the_bits_of_one_that_came_in_parts(dtype: torch.dtype) -> None:
    theirs = tiny_model("llama", dtype=dtype, tie_word_embeddings=True).state_dict()
    mine = tiny_model("llama", dtype=dtype, tie_word_embeddings=True, seed=1)
    assert not all(torch.equal(value, theirs[name]) for name, value in mine.state_dict().items())
    parts = list(weight_chunks(theirs.items(), 4096))
    assert len(parts) > 2
    for part, _ in parts:
        StoredWeights.of(part).update(3).copy_to(mine)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.state_dict().items())


class Ranks:
    """A group that hands out weights, a part for each tensor, and remembers what its ranks have loaded."""

    def __init__(self, weights: Sequence[tuple[str, Tensor]] = (), broken: str = "") -> None:
        self.size, self.transfers = 2, Transfers()
        self.weights, self._broken = weights, broken
        self.shared: list[str] = []
        self.loaded: list[tuple[object, ...]] = []

    def share_weights(self, part: str) -> Iterator[object]:
        for name, value in self.weights:
            if name == self._broken:
                raise ValueError("a rank is lost")
            self.shared.append(name)
            yield StoredWeights.of([(name, value.clone())])

    def read(self, shared: object) -> object:
        return shared

    def call(self, part: str, method: str, arguments: Sequence[Any]) -> list[int]:
        if method == "refresh":
            self.loaded.append(("refresh",))
            return [5] * self.size
        for version, stored in arguments:
            self.loaded += [(version, name, value.tolist()) for name, value in stored.update(version).tensors]
        return [stored.nbytes for _, stored in arguments]


class Handle(EngineHandle):
    saving: Any = None


def test_each_part_goes_to_every_rank_that_samples() -> None:
    learners, samplers = Ranks(WEIGHTS), Ranks()
    engine = Handle(learners, "actor")
    engine.version = 7
    ShardedSampler(samplers, "sampler", frozenset(), None, 1).load_weights(engine.export())
    assert samplers.loaded == [(7, name, value.tolist()) for name, value in WEIGHTS for _ in range(2)]
    assert samplers.transfers.take()["transfer/weights_bytes"] == 2 * 3 * 8


def test_ranks_that_learn_and_sample_take_over_their_own() -> None:
    ranks = Ranks(WEIGHTS)
    ShardedSampler(ranks, "sampler", frozenset(), None, 1).load_weights(Handle(ranks, "actor").export())
    assert ranks.loaded == [("refresh",)]
    assert ranks.shared == []


def test_a_copy_stays_as_it_is_while_the_engine_learns() -> None:
    learners = Ranks([(name, value.clone()) for name, value in WEIGHTS])
    now, kept = Handle(learners, "actor").export(), Handle(learners, "actor", copies=True).export()
    assert (now.is_copy, kept.is_copy, kept.copied() is kept) == (False, True, True)
    for _, value in learners.weights:
        value.zero_()
    assert [(name, value.tolist()) for name, value in kept.tensors] == [(n, v.tolist()) for n, v in WEIGHTS]
    assert not any(value.any() for _, value in now.tensors)


def test_a_copy_is_right_where_memory_is_freed_and_used_again_meanwhile() -> None:
    memory = torch.zeros(2)
    come = ((str(number), memory.fill_(number).view(2)) for number in (1, 2, 3))
    found = WeightUpdate(1, come).copied().tensors
    assert [(name, value.tolist()) for name, value in found] == [("1", [1, 1]), ("2", [2, 2]), ("3", [3, 3])]


def test_an_error_in_the_middle_ends_the_transfer() -> None:
    samplers = Ranks()
    weights = Handle(Ranks(WEIGHTS, broken="three"), "actor").export()
    with pytest.raises(ValueError, match="a rank is lost"):
        ShardedSampler(samplers, "sampler", frozenset(), None, 1).load_weights(weights)
    assert [name for _, name, _ in samplers.loaded] == ["one", "one", "two", "two"]
