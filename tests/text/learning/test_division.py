"""Rows go to ranks by what they cost; nothing but that depends on the ranks."""

import pytest
import torch

from tether.loop.engine import LossSizes, UpdatePlan
from tether.text.learning.packing import balance_metrics, balanced, divide, in_order, mini_batches


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
            found[parts[number].positions] = rows[parts[number].rows]
        assert found.tolist() == mini.rows.tolist()
    assert 0 not in torch.cat([rows for rows, _ in shares])


def test_the_busiest_rank_over_the_mean() -> None:
    """8 + 7 + 6 and 5 + 4 as they come; 16 and 14 as they are dealt, of which the mean is 15."""
    tokens = [8, 7, 6, 5, 4]
    minis = mini_batches(torch.ones(5, 1, dtype=torch.bool), UpdatePlan(mini_batch_rows=5, epochs=2), 0)
    shares = {deal: divide(minis, tokens, 2, deal) for deal in (balanced, in_order)}
    found = balance_metrics(minis, shares[balanced], tokens, tokens)
    assert {key.removeprefix("global_seqlen/"): value for key, value in found.items()} == {
        "min": 9, "max": 21, "minmax_diff": 12, "balanced_min": 14, "balanced_max": 16, "mean": 15,
        "busiest_over_mean": pytest.approx(16 / 15),
    }  # fmt: skip
    assert balance_metrics(minis, shares[in_order], tokens, tokens)["global_seqlen/busiest_over_mean"] == 21 / 15
    assert balance_metrics([], divide([], [], 2, balanced), [], [])["global_seqlen/busiest_over_mean"] == 1
