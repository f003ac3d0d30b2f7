"""Rows go to ranks by what they cost; nothing but that depends on the ranks."""

import pytest
import torch

from tether.training.division import balanced, divide, mini_batches
from tether.training.protocol import LossSizes, UpdatePlan


def test_the_largest_differences_are_evened_out_first() -> None:
    """Karmarkar and Karp's own example: 8 7 6 5 4 makes 8 + 6 and 7 + 5 + 4, by differences 1, 1, 4; 1, 3; 2."""
    costs = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert sorted(sum(costs[row] for row in rows) for rows in balanced(costs, 2)) == [14, 16]
    assert balanced(costs, 1) == [[0, 1, 2, 3, 4]]
    assert balanced([], 3) == [[], [], []]
    assert sorted(balanced([1.0], 2)) == [[], [0]]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_long_rows_do_not_meet_on_one_rank(ranks: int) -> None:
    costs = torch.rand(40, generator=torch.Generator().manual_seed(0)).exp2().tolist()
    loads = [sum(costs[row] for row in rows) for rows in balanced(costs, ranks)]
    assert max(loads) < 1.05 * sum(costs) / ranks
    assert sorted(row for rows in balanced(costs, ranks) for row in rows) == list(range(40))


def test_each_row_of_a_mini_batch_is_on_one_rank_and_knows_its_place() -> None:
    mask = torch.arange(6)[:, None] > torch.tensor([[0, 2]])  # rows 1 and 2 have one token, 3, 4 and 5 two, 0 has none
    minis = mini_batches(mask, UpdatePlan(mini_batch_rows=4, epochs=2, shuffle=True), 7)
    assert [mini.sizes for mini in minis[:2]] == [
        LossSizes(int(mask[mini.rows].sum()), len(mini.rows)) for mini in minis[:2]
    ]
    shares = divide(minis, [1.0] * 6, 2, balanced)
    for number, mini in enumerate(minis):
        found = torch.full_like(mini.rows, -1)
        for rows, parts in shares:
            assert parts[number].sizes == mini.sizes
            found[parts[number].places] = rows[parts[number].rows]
        assert found.tolist() == mini.rows.tolist()
    assert 0 not in torch.cat([rows for rows, _ in shares])
