"""The plan of an update: which rows go into which mini-batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.loop.engine import UpdatePlan


def numbers(plan: UpdatePlan, rows: int, step: int = 0, epoch: int = 0) -> list[list[int]]:
    return [mini.tolist() for mini in plan.mini_batches(rows, step, epoch)]


def test_rows_stay_in_order_and_the_last_mini_batch_may_be_short() -> None:
    assert numbers(UpdatePlan(3), 7) == [[0, 1, 2], [3, 4, 5], [6]]
    assert numbers(UpdatePlan(3), 2) == [[0, 1]]
    assert numbers(UpdatePlan(3), 7, step=4, epoch=2) == numbers(UpdatePlan(3), 7)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_shuffle_has_every_row_once(rows: int, size: int, step: int, epoch: int) -> None:
    minis = numbers(UpdatePlan(size, shuffle=True), rows, step, epoch)
    assert sorted(row for mini in minis for row in mini) == list(range(rows))
    assert all(len(mini) == size for mini in minis[:-1])


def test_a_shuffle_depends_on_seed_step_and_epoch_alone() -> None:
    plan = UpdatePlan(4, shuffle=True, seed=1)
    first = numbers(plan, 20, step=3, epoch=1)
    assert first == numbers(plan, 20, step=3, epoch=1)
    others = [numbers(plan, 20, 4, 1), numbers(plan, 20, 3, 2), numbers(UpdatePlan(4, shuffle=True, seed=2), 20, 3, 1)]
    assert first not in others
    assert first != numbers(UpdatePlan(4), 20)


def test_draws_depend_on_seed_step_epoch_and_mini_batch_alone() -> None:
    def draw(seed: int, *where: int) -> float:
        return float(torch.rand((), generator=UpdatePlan(4, seed=seed).generator(*where)))

    assert draw(1, 3, 1, 0) == draw(1, 3, 1, 0)
    assert len({draw(1, 3, 1, 0), draw(2, 3, 1, 0), draw(1, 4, 1, 0), draw(1, 3, 2, 0), draw(1, 3, 1, 1)}) == 5


def test_without_rows_there_is_no_mini_batch() -> None:
    assert numbers(UpdatePlan(3), 0) == []
