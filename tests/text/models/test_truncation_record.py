"""The record of kept tokens gives back, bit for bit, what the sampler kept, in the memory that it promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.batch import KeptTokens
from tether.text.models.truncation_record import KeptRecorder, KeptSets


def sets(vocabulary: int, *tokens: set[int]) -> Tensor:
    kept = torch.zeros(len(tokens), vocabulary, dtype=torch.bool)
    for row, ids in enumerate(tokens):
        kept[row, list(ids)] = True
    return kept


def record(kept: Tensor, lengths: list[int], order: list[tuple[int, int]]) -> KeptTokens:
    """Take down `kept` [B, T, V] up to the lengths of the rows, two positions at a time, in this order."""
    recorder = KeptRecorder(len(kept), kept.shape[1] + 3, kept.shape[2], kept.device)
    for start in range(0, len(order), 2):
        row, position = torch.tensor(order[start : start + 2]).T
        recorder.add(row, position, kept[row, position])
    return recorder.result(max(lengths))


def read(found: KeptTokens, vocabulary: int, chunk: int) -> Tensor:
    """[B * T, V] of every position, put together from chunks of the vocabulary."""
    slots = torch.arange(found.count.numel())
    looked_up = KeptSets.read(found, slots, vocabulary)
    spans = (slice(start, min(start + chunk, vocabulary)) for start in range(0, vocabulary, chunk))
    return ~torch.cat([looked_up.cut(span) for span in spans], dim=1)


def test_the_worked_example_of_the_docstring() -> None:
    recorder = KeptRecorder(1, 2, 64, torch.device("cpu"))
    for position, tokens in enumerate(({5, 9}, {0, 1, 33})):
        recorder.add(torch.tensor([0]), torch.tensor([position]), sets(64, tokens))
    found = recorder.result(2)
    assert found.count.tolist() == [[2, 3]]
    assert [row.tolist() for row in found.words] == [[5, 9, 0b11, 0b10]]
    assert found.count.dtype == found.words[0].dtype == torch.int32
    assert torch.equal(read(found, 64, 64), sets(64, {5, 9}, {0, 1, 33}))


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 140), st.integers(1, 150), st.randoms(use_true_random=False)
)
@settings(max_examples=100, deadline=None)
def test_every_set_comes_back_whatever_the_order_and_the_chunks(rows, width, vocabulary, chunk, random) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    lengths = [random.randint(1, width) for _ in range(rows)]
    share = torch.rand(rows, width, 1, generator=generator)
    kept = torch.rand(rows, width, vocabulary, generator=generator) < share**3
    order = [(row, position) for row, n in enumerate(lengths) for position in range(n)]
    random.shuffle(order)
    found = record(kept, lengths, order)
    sampled = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    expected = kept[:, : max(lengths)] & sampled[:, :, None]
    assert torch.equal(found.count, expected.sum(-1))
    assert torch.equal(read(found, vocabulary, chunk), expected.flatten(0, 1))
    chosen = torch.tensor(random.sample(range(rows), random.randint(1, rows)))  # as a micro-batch holds them
    assert torch.equal(read(found[chosen], vocabulary, chunk), expected[chosen].flatten(0, 1))


@pytest.mark.parametrize(("kept", "words"), [(20, 20), (5000, 4748), (151_936, 4748)])
def test_a_position_never_takes_more_than_a_bit_mask(kept: int, words: int) -> None:
    recorder = KeptRecorder(1, 1, 151_936, torch.device("cpu"))
    recorder.add(torch.tensor([0]), torch.tensor([0]), (torch.arange(151_936) < kept)[None])
    assert [len(row) for row in recorder.result(1).words] == [words]


def test_a_long_row_does_not_widen_the_others() -> None:
    found = record(torch.stack([sets(64, {1}, {2, 3}), sets(64, {1}, {4})]), [2, 1], [(0, 0), (0, 1), (1, 0)])
    assert [len(row) for row in found.words] == [3, 1]
    assert all(row.untyped_storage().nbytes() == 4 * len(row) for row in found.words)  # nothing is shared behind them


def test_a_record_that_was_cut_is_noticed() -> None:
    found = record(sets(64, {1}, {2, 3})[None], [2], [(0, 0), (0, 1)])
    found.count = found.count[:, :1]
    with pytest.raises(AssertionError, match="the record was cut"):
        KeptSets.read(found, torch.tensor([0]), 64)
