import itertools
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.text.data.prompts import PromptSampler


def batches(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.next_batch() for _ in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_comes_exactly_once_an_epoch(shuffle: bool) -> None:
    for size, batch_size in itertools.product(range(1, 14), range(1, 8)):
        sampler = PromptSampler(size, batch_size, shuffle=shuffle, seed=3)
        for epoch in range(3):
            assert sampler.epoch == epoch
            drawn = batches(sampler, sampler.batches_per_epoch)
            assert sorted(row for batch in drawn for row in batch) == list(range(size))
            assert {len(batch) for batch in drawn[:-1]} <= {batch_size}
            assert len(drawn[-1]) == size - batch_size * (len(drawn) - 1)


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63),
    stop=st.integers(0, 30),
)
def test_resuming_anywhere_goes_on_as_if_nothing_happened(
    size: int, batch_size: int, shuffle: bool, seed: int, stop: int
) -> None:
    whole = PromptSampler(size, batch_size, shuffle=shuffle, seed=seed)
    batches(whole, stop)
    resumed = PromptSampler(size, batch_size, shuffle=shuffle, seed=seed)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.epoch == whole.epoch
    assert batches(resumed, 10) == batches(whole, 10)


def test_the_state_is_epoch_and_cursor() -> None:
    sampler = PromptSampler(5, 2, shuffle=True, seed=0)
    states = []
    for _ in range(4):
        states.append(sampler.state_dict())
        sampler.next_batch()
    assert states == [
        {"epoch": 0, "cursor": 0},
        {"epoch": 0, "cursor": 2},
        {"epoch": 0, "cursor": 4},
        {"epoch": 1, "cursor": 0},
    ]


def test_a_resume_may_change_the_batch_size() -> None:
    before = PromptSampler(10, 4, shuffle=True, seed=1)
    first = before.next_batch()
    after = PromptSampler(10, 3, shuffle=True, seed=1)
    after.load_state_dict(before.state_dict())
    rest = batches(after, 2)
    assert sorted(first + rest[0] + rest[1]) == list(range(10))


def test_orders_differ_by_epoch_and_seed() -> None:
    sampler = PromptSampler(50, 50, shuffle=True, seed=7)
    first, second = batches(sampler, 2)
    other = PromptSampler(50, 50, shuffle=True, seed=8).next_batch()
    assert first != second
    assert first != other
    assert PromptSampler(50, 50, shuffle=True, seed=7).next_batch() == first


def test_the_order_is_the_same_on_every_machine() -> None:
    """Written down once: a change here would silently reorder the data of every run that resumes."""
    assert PromptSampler(8, 8, shuffle=True, seed=1).next_batch() == [1, 5, 7, 3, 4, 2, 0, 6]


def test_unshuffled_rows_keep_their_order() -> None:
    sampler = PromptSampler(5, 2, shuffle=False, seed=0)
    assert list(islice(iter(sampler.next_batch, None), 4)) == [[0, 1], [2, 3], [4], [0, 1]]


def test_a_cursor_beyond_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="cursor 9 is beyond the dataset's 5 prompts"):
        PromptSampler(5, 2, shuffle=True, seed=0).load_state_dict({"epoch": 0, "cursor": 9})
