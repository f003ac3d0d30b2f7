"""How rows are dealt out to micro-batches."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.text.learning.packing import MicroBatching, RowSize

LENGTHS = st.lists(st.integers(1, 40), max_size=30)
LIMIT = st.none() | st.integers(1, 60)
SIZES = st.lists(st.builds(RowSize, st.integers(0, 3), st.integers(5, 5), st.integers(1, 20)), max_size=30)
quick = settings(max_examples=60, deadline=None)


def own_prompts(lengths: list[int]) -> list[RowSize]:
    """Rows of these lengths, each with a prompt of its own of one token."""
    return [RowSize(row, 1, length - 1) for row, length in enumerate(lengths)]


@given(LENGTHS, LIMIT, LIMIT, st.booleans())
@quick
def test_every_row_once_and_no_limit_passed(
    lengths: list[int], max_rows: int | None, max_tokens: int | None, packed: bool
) -> None:
    groups = MicroBatching(max_rows, max_tokens, packed).split(own_prompts(lengths))
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
    for group in MicroBatching(max_tokens=max_tokens).split(own_prompts(lengths)):
        if any(lengths[row] > max_tokens for row in group):
            assert len(group) == 1


@given(LENGTHS, st.integers(1, 60))
@quick
def test_a_budget_is_used(lengths: list[int], max_tokens: int) -> None:
    """Two neighbouring micro-batches do not fit into one, so at most twice as many are made as are needed."""
    totals = [
        sum(lengths[row] for row in group) for group in MicroBatching(max_tokens=max_tokens).split(own_prompts(lengths))
    ]
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
    assert micro.split(own_prompts([5, 2, 9, 3, 4])) == expected


def test_rows_of_one_prompt_stay_together_and_count_it_once() -> None:
    """Prompts of 10 tokens, responses of 1 to 4: one prompt with two of them has 17 tokens at most, and not 27."""
    rows = [RowSize(0, 10, 3), RowSize(1, 10, 4), RowSize(0, 10, 1), RowSize(1, 10, 2)]
    assert MicroBatching(max_tokens=17).split(rows) == [[1, 3], [0, 2]]
    assert MicroBatching(max_tokens=30).split(rows) == [[1, 3, 0, 2]]
    assert MicroBatching(max_tokens=29).split(rows) == [[1, 3, 0], [2]]
    assert MicroBatching(max_tokens=30, packed=False).split(rows) == [[1, 0], [3, 2]]


@given(SIZES, st.integers(1, 60))
@quick
def test_a_budget_holds_with_shared_prompts(rows: list[RowSize], max_tokens: int) -> None:
    groups = MicroBatching(max_tokens=max_tokens).split(rows)
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))
    for group in groups:
        cost = 5 * len({rows[i].prompt for i in group}) + sum(rows[i].response_tokens for i in group)
        assert cost <= max_tokens or len(group) == 1


def test_no_rows_no_micro_batches() -> None:
    assert MicroBatching(max_tokens=8).split([]) == []
