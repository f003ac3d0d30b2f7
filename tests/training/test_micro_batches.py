"""How rows are dealt out to micro-batches."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.training.micro_batches import MicroBatching

LENGTHS = st.lists(st.integers(1, 40), max_size=30)
LIMIT = st.none() | st.integers(1, 60)
quick = settings(max_examples=60, deadline=None)


@given(LENGTHS, LIMIT, LIMIT, st.booleans())
@quick
def test_every_row_once_and_no_limit_passed(
    lengths: list[int], max_rows: int | None, max_tokens: int | None, packed: bool
) -> None:
    groups = MicroBatching(max_rows, max_tokens, packed).split(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        taken = [lengths[row] for row in group]
        assert taken
        assert max_rows is None or len(taken) <= max_rows
        cost = sum(taken) if packed else max(taken) * len(taken)
        assert max_tokens is None or cost <= max_tokens or len(taken) == 1


@given(LENGTHS, st.integers(1, 60))
@quick
def test_a_row_over_the_budget_is_alone(lengths: list[int], max_tokens: int) -> None:
    for group in MicroBatching(max_tokens=max_tokens).split(lengths):
        if any(lengths[row] > max_tokens for row in group):
            assert len(group) == 1


@given(LENGTHS, st.integers(1, 60))
@quick
def test_a_budget_is_used(lengths: list[int], max_tokens: int) -> None:
    """Two neighbouring micro-batches do not fit into one, so at most twice as many are made as are needed."""
    totals = [sum(lengths[row] for row in group) for group in MicroBatching(max_tokens=max_tokens).split(lengths)]
    assert all(a + b > max_tokens for a, b in pairwise(totals))


@pytest.mark.parametrize(
    ("micro", "expected"),
    [
        (MicroBatching(max_rows=2), [[0, 1], [2, 3], [4]]),
        (MicroBatching(max_tokens=9), [[2], [0, 4], [3, 1]]),
        (MicroBatching(max_tokens=8, packed=False), [[2], [0], [4, 3], [1]]),  # 4 and 3 cost twice 4
        (MicroBatching(max_rows=1, max_tokens=100), [[2], [0], [4], [3], [1]]),
    ],
)
def test_by_hand(micro: MicroBatching, expected: list[list[int]]) -> None:
    """A token budget takes the rows from the longest on."""
    assert micro.split([5, 2, 9, 3, 4]) == expected


def test_no_rows_no_micro_batches() -> None:
    assert MicroBatching(max_tokens=8).split([]) == []
