"""The comparison with other libraries notices what it is there to notice. No peer is needed: both sides are tether."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.oracles import ours
from benchmarks.oracles.cases import SCENARIOS, Case, make_case
from benchmarks.oracles.compare import Check, Difference, Outputs, largest_difference, run_checks
from benchmarks.oracles.report import page, show

GRPO = ours.estimate("grpo", uid="uid")


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Case], Outputs]:
    return lambda case: {name: change(value) for name, value in GRPO(case).items()}


def raising(_: Case) -> Outputs:
    raise ValueError("no groups of one")


def only(check: Check) -> Difference:
    (difference,) = run_checks("peer", [check])
    return difference


def test_the_same_function_agrees_everywhere() -> None:
    scenarios = tuple(name for name in SCENARIOS if name != "far")
    for difference in run_checks("peer", [Check("grpo", GRPO, GRPO, scenarios)]):
        assert difference.agrees
        assert difference.absolute == 0.0
        assert not difference.unexplained


def test_a_planted_difference_is_reported_and_has_to_be_explained() -> None:
    planted = changed(lambda advantages: advantages * 1.001)
    found = only(Check("grpo", GRPO, planted, ("ragged",)))
    assert not found.agrees
    assert found.relative == pytest.approx(0.001 / 1.001)
    assert found.unexplained
    explained = only(Check("grpo", GRPO, planted, ("ragged",), {"ragged": "tether: 1.001 is not 1"}))
    assert not explained.agrees
    assert not explained.unexplained


def test_one_wrong_token_of_one_row_is_enough() -> None:
    def planted(case: Case) -> Outputs:
        found = dict(GRPO(case))
        found["returns"] = found["returns"].index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(9.0).double())
        return found

    assert not only(Check("grpo", GRPO, planted, ("ragged",))).agrees


def test_a_reason_without_a_difference_is_reported() -> None:
    assert only(Check("grpo", GRPO, GRPO, ("ragged",), {"ragged": "once true"})).unexplained
    assert only(Check("grpo", GRPO, GRPO, ("ragged",), raises={"ragged": "once true"})).unexplained


def test_an_error_is_not_explained_by_the_reason_of_a_difference() -> None:
    found = only(Check("grpo", GRPO, raising, ("ragged",), {"ragged": "a choice"}))
    assert found.error == "ValueError: no groups of one"
    assert found.unexplained
    assert not only(Check("grpo", GRPO, raising, ("ragged",), raises={"ragged": "a choice"})).unexplained


def test_numbers_are_compared_where_the_mask_is_true() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    a, b = torch.tensor([[1.0, 2.0], [4.0, 7.0]]), torch.tensor([[1.0, 2.5], [4.0, torch.nan]])
    assert largest_difference(a, b, mask) == (0.5, 0.125)
    assert largest_difference(a, b, torch.ones_like(mask))[0] == float("inf")
    assert largest_difference(b, b, torch.ones_like(mask)) == (0.0, 0.0)
    assert largest_difference(torch.tensor(0.0), torch.tensor(1e-3), mask) == pytest.approx((1e-3, 1.0))


def test_cases_are_what_they_say() -> None:
    for name in SCENARIOS:
        case = make_case(name, 0)
        assert torch.equal(case.mask, make_case(name, 0).mask)
        valid = case.rewards[case.mask]
        assert not valid.isnan().any()
    assert make_case("poison", 0).values.isnan().any()
    assert (make_case("empty", 0).mask.sum(dim=-1) == 0).sum() == 1
    assert (make_case("lone", 0).uid.bincount() == 1).sum() == 1
    tools = make_case("tools", 0)
    assert (tools.mask[:, 1:] & ~tools.mask[:, :-1]).any()
    equal = make_case("equal", 0)
    assert all(equal.scores[equal.uid == group].unique().numel() == 1 for group in range(4))


def test_the_page_shows_agreement_reasons_and_what_is_left_out() -> None:
    agreeing = Difference("rloo", "peer", "ragged", 2e-16, 1e-16, True, None, None)
    differing = replace(agreeing, scenario="empty", absolute=0.25, agrees=False, reason="tether: because")
    unexplained = replace(differing, function="grpo", reason=None)
    text = page({"peer": "1.2"}, {"other": "no such package"}, "2.13", [agreeing, differing, unexplained])
    assert "| rloo | 2e-16 / 1e-16 [1] |" in text
    assert "| [1] peer | rloo | empty | 2e-1 | tether: because |" in text
    assert "| [2] peer | grpo | empty | 2e-1 | **unexplained** |" in text
    assert "Left out: other (no such package)." in text
    assert "peer 1.2, torch 2.13" in text
    assert show(0.0) == "0"
