"""Promise 3 for the mathematics alone: what stands at a masked position, how many there are, and in which order rows
come changes nothing. With the slow tests every estimator meets every policy loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.cases import PER_ROW, Case, make_case
from tests.pairwise import in_turn
from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TOKEN_SELECTIONS,
    Advantages,
    apply_kl_penalty,
    count_valid,
    kl_penalty,
    value_loss,
)
from tether.loop.engine import LossSizes
from tether.text.learning.losses import Aggregation

Step = Callable[[Case], dict[str, Tensor]]
MODES = (*AGGREGATIONS, "masked_mean_ratio")
KL_KINDS = [kind for kind in KL_ESTIMATORS if kind != "full"]  # that one never sees a masked position: see `full_kl`
VALUE_LOSSES: list[dict[str, Any]] = [
    {"cliprange_value": clip, "huber_delta": delta} for clip in (0.2, None) for delta in (None, 0.7)
]
WIDTH = 9
"""Longest response allowed, in tokens; batches are narrower and wider."""
SAME_SUMS = 1e-12
"""How far sums may differ whose terms come in another order."""


# --- one step, in tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    estimator: str
    loss: str
    mode: str
    kl_kind: str
    value: dict[str, Any]

    def __str__(self) -> str:
        return "-".join((self.estimator, self.loss, self.mode, self.kl_kind))

    def __call__(self, case: Case) -> dict[str, Tensor]:
        """Everything between the rewards and the gradients, by name."""
        mask, counts = case.mask, count_valid(case.mask)
        aggregate, sizes = Aggregation(self.mode, width=WIDTH), LossSizes(int(counts[0]), int(counts[1]))
        log_probs, values = (x.clone().requires_grad_() for x in (case.log_probs, case.values))
        old_kl = kl_penalty(case.old_log_probs, case.ref_log_probs, self.kl_kind, mask)
        rewards, kl = apply_kl_penalty(case.rewards, old_kl, mask, kl_coef=0.1)
        found = ADVANTAGE_ESTIMATORS[self.estimator](rewards, mask, **case.estimator_inputs, gamma=0.9, lam=0.8)
        selected = selection(self.loss, case, found)
        policy = POLICY_LOSSES[self.loss](
            log_probs, case.old_log_probs, found.advantages, mask, **case.loss_inputs | selected, clip_ratio_high=0.3
        )
        kl_loss = kl_penalty(log_probs, case.ref_log_probs, self.kl_kind, mask)
        critic = value_loss(values, case.rewards, found.returns, mask, **self.value)
        losses = {"policy": policy.loss, "kl": kl_loss, "value": critic.loss}
        totals = {f"{name} loss": aggregate(loss, mask, sizes) for name, loss in losses.items()}
        torch.stack([*totals.values()]).sum().backward()
        metrics = {name: torch.tensor(float(metric)) for name, metric in (policy.metrics | critic.metrics).items()}
        return {
            "rewards": rewards, "kl": kl, "advantages": found.advantages, "returns": found.returns, **selected,
            **{f"{name} of each token": loss.detach() for name, loss in losses.items()},
            **{name: total.detach() for name, total in totals.items()}, **metrics,
            "gradient of log_probs": log_probs.grad, "gradient of values": values.grad,
        }  # fmt: skip


def selection(loss: str, case: Case, found: Advantages) -> dict[str, Tensor]:
    """The tokens that a loss treats apart; all candidates, so that the draw does not depend on the order of rows."""
    if loss not in TOKEN_SELECTIONS:
        return {}
    options = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.01, "kl_cov_ratio": 0.2, "generator": torch.Generator()}
    arguments = (case.log_probs, case.old_log_probs, found.advantages, case.mask)
    return {"selected": TOKEN_SELECTIONS[loss](*arguments, **options)}


def combinations(*options: Sequence[Any]) -> list[Combination]:
    """Every value of the options in turn, with the aggregations, KL kinds and value losses."""
    return [Combination(*case) for case in in_turn(*options, MODES, KL_KINDS, VALUE_LOSSES)]


QUICK = combinations(list(ADVANTAGE_ESTIMATORS), list(POLICY_LOSSES))


# --- what must not matter -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A case that says the same, and where in it the rows of the old one are."""

    case: Case
    rows: Tensor
    width: int

    def kept(self, output: Tensor) -> Tensor:
        return output[self.rows, : self.width] if output.ndim == 2 else output


def changes(case: Case) -> dict[str, Change]:
    rows, width = case.mask.shape
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(7))
    same = torch.arange(rows)
    longer = case.rows(torch.tensor([*range(rows), 0]))
    longer = replace(longer, mask=longer.mask & (torch.arange(rows + 1) < rows)[:, None])
    poisons = {str(poison): Change(case.poisoned(poison), same, width) for poison in (math.nan, 1e9, math.inf)}
    return poisons | {
        "padded": Change(padded(case, 3).poisoned(math.nan), same, width),
        "permuted": Change(case.rows(order), order.argsort(), width),
        "one more masked row": Change(longer.poisoned(math.nan), same, width),
    }


def padded(case: Case, columns: int) -> Case:
    wider = {
        field.name: torch.nn.functional.pad(getattr(case, field.name), (0, columns))
        for field in fields(case)
        if field.name not in PER_ROW
    }
    return replace(case, **wider)


def differences(step: Step, case: Case) -> dict[str, dict[str, float]]:
    """Change -> output -> how far it moved, relative to 1 + its size; only what moved. What became NaN moved by inf."""
    before = step(case)
    moved: dict[str, dict[str, float]] = {}
    for name, change in changes(case).items():
        after = step(change.case)
        for output, old in before.items():
            old = old.double()
            distance = ((change.kept(after[output]).double() - old).abs() / (1 + old.abs())).nan_to_num(math.inf)
            if distance.max() > 0:
                moved.setdefault(name, {})[output] = float(distance.max())
    return moved


@pytest.fixture(scope="module")
def case() -> Case:
    """Ragged rows with holes, groups of odd sizes, a row without a token."""
    case = make_case(3, rows=9, width=7)
    assert len(set(case.mask.sum(dim=1).tolist())) > 3
    assert not case.mask.any(dim=1).all()
    return case


@pytest.mark.parametrize("combination", QUICK, ids=str)
def test_poison_changes_no_bit_and_padding_and_order_no_sum(combination: Combination, case: Case) -> None:
    moved = differences(combination, case)
    assert moved.keys() <= {"padded", "permuted", "one more masked row"}, moved
    for outputs in moved.values():
        assert not outputs.keys() & {"rewards", "selected", "kl of each token"}, "nothing is summed in these"
        assert max(outputs.values()) < SAME_SUMS, outputs


@pytest.mark.slow
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_no_estimator_breaks_it_for_another_loss(loss: str, case: Case) -> None:
    for combination in combinations(list(ADVANTAGE_ESTIMATORS), [loss]):
        test_poison_changes_no_bit_and_padding_and_order_no_sum(combination, case)


# --- negative controls: what peers did, each seen by the change that its users saw it by --------------------------


def values_of_every_position(case: Case) -> dict[str, Tensor]:
    """A critic's value of 100 at a masked slot makes advantages of 5.70 and 6.0 out of others (ROLL #447)."""
    advantage, following = torch.zeros(len(case.mask)), torch.zeros(len(case.mask))
    columns = []
    for rewards, values, mask in reversed([*zip(case.rewards.T, case.values.T, case.mask.T, strict=True)]):
        advantage = torch.where(mask, rewards, 0.0) + following - values + 0.95 * advantage
        following = values
        columns.append(torch.where(mask, advantage, 0.0))
    return {"advantages": torch.stack(columns[::-1], dim=1)}


def mean_over_the_width(case: Case) -> dict[str, Tensor]:
    """Padding counts in the mean of a row (verl #3805)."""
    return {"loss": torch.where(case.mask, case.advantages, 0.0).mean(dim=1).sum()}


def groups_by_position(case: Case) -> dict[str, Tensor]:
    """Three rows in a row are taken for a group, whatever they answer (slime #1918)."""
    scores = torch.where(case.mask, case.rewards, 0.0).sum(dim=1)
    centred = torch.cat([group - group.mean() for group in scores.split(3)])
    return {"advantages": torch.where(case.mask, centred[:, None], 0.0)}


def score_in_the_last_column(case: Case) -> dict[str, Tensor]:
    """The score is read off the last position, which may be a tool's token or padding (miles #1827)."""
    return {"advantages": torch.where(case.mask, case.rewards[:, -1:], 0.0)}


def scores_masked_by_multiplication(case: Case) -> dict[str, Tensor]:
    """One NaN poisons the whole group (TRL #5773, AReaL #1347)."""
    scores = (case.rewards * case.mask).sum(dim=1)
    member = (case.uid[:, None] == case.uid).double()
    centred = scores - member @ scores / member.sum(dim=1)
    return {"advantages": torch.where(case.mask, centred[:, None], 0.0)}


@pytest.mark.parametrize(
    ("legacy", "shown_by"),
    [
        (values_of_every_position, "1000000000.0"),
        (mean_over_the_width, "padded"),
        (groups_by_position, "permuted"),
        (score_in_the_last_column, "padded"),
        (scores_masked_by_multiplication, "nan"),
    ],
)
def test_the_bugs_of_peers_would_show(legacy: Step, shown_by: str, case: Case) -> None:
    assert max(differences(legacy, case)[shown_by].values()) > 1e-3
