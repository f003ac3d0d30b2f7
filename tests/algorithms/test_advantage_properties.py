"""Properties of every estimator: masked positions do not exist, and the order of rows does not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.cases import CASES, Case
from tether.algorithms import ADVANTAGE_ESTIMATORS, Advantages

pytestmark = pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
few = settings(max_examples=8, deadline=None)


def run(name: str, case: Case) -> Advantages:
    return ADVANTAGE_ESTIMATORS[name](case.rewards, case.mask, **case.estimator_inputs, gamma=0.9, lam=0.8)


def assert_same(got: Advantages, expected: Advantages, tolerance: float = 1e-12) -> None:
    for actual, wanted in ((got.advantages, expected.advantages), (got.returns, expected.returns)):
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@given(CASES, st.sampled_from([math.nan, math.inf, 1e9, -1e9]))
@few
def test_masked_poison_changes_no_bit(name: str, case: Case, poison: float) -> None:
    clean, poisoned = run(name, case), run(name, case.poisoned(poison))
    assert torch.equal(clean.advantages, poisoned.advantages)
    assert torch.equal(clean.returns, poisoned.returns)
    assert not clean.advantages[~case.mask].any()
    assert not clean.returns[~case.mask].any()


@given(CASES, st.integers(0, 1000))
@few
def test_rows_may_come_in_any_order(name: str, case: Case, seed: int) -> None:
    order = torch.randperm(len(case.mask), generator=torch.Generator().manual_seed(seed))
    plain = run(name, case)
    assert_same(run(name, case.rows(order)), Advantages(plain.advantages[order], plain.returns[order]))


@given(CASES, st.data())
@few
def test_a_masked_column_anywhere_changes_nothing(name: str, case: Case, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, case.mask.shape[1]))
    wider = run(name, case.with_column(at))
    kept = torch.arange(case.mask.shape[1] + 1) != at
    assert_same(Advantages(wider.advantages[:, kept], wider.returns[:, kept]), run(name, case))
    assert not wider.advantages[:, at].any()


@given(CASES)
@few
def test_one_more_masked_row_changes_nothing(name: str, case: Case) -> None:
    rows = len(case.mask)
    more = case.rows(torch.tensor([*range(rows), 0]))
    more.mask[rows] = False
    longer = run(name, more)
    assert_same(Advantages(longer.advantages[:rows], longer.returns[:rows]), run(name, case))
    assert not longer.advantages[rows].any()
