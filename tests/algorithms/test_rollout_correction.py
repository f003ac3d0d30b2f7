import math

import pytest
import torch
from hypothesis import given, settings

from tests.algorithms.cases import CASES, Case
from tether.algorithms import (
    importance_metrics,
    importance_weights,
    off_policy_metrics,
    parse_rejection,
    parse_weight_bounds,
    rejection_mask,
    rejection_metrics,
    veto_mask,
)

LN = math.log
# p_rollout is 1, so that rho = p: row 0: 4 and 1/2, row 1: 1.1, row 2 empty.
RHO = torch.tensor([[4.0, 0.5], [1.1, math.nan], [math.nan, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]])
ARGS = (RHO.log(), torch.zeros_like(RHO), MASK)


def valid(tokens: torch.Tensor) -> list[float]:
    assert not tokens[MASK == 0].any()
    return tokens[MASK == 1].tolist()


def test_importance_weights() -> None:
    assert valid(importance_weights(*ARGS, level="token", threshold=2.0)) == pytest.approx([2, 0.5, 1.1])
    # row 0: 4 * 1/2 = 2 at both tokens
    assert valid(importance_weights(*ARGS, level="sequence", threshold=1.5)) == pytest.approx([1.5, 1.5, 1.1])
    assert valid(importance_weights(*ARGS, level="token", batch_normalize=True)) == pytest.approx(
        [x / 1.2 for x in (2, 0.5, 1.1)]
    )
    # mean over rows: (2 + 1.1) / 2
    assert valid(importance_weights(*ARGS, level="sequence", batch_normalize=True)) == pytest.approx(
        [x / 1.55 for x in (2, 2, 1.1)]
    )
    with pytest.raises(ValueError, match=r"unknown level 'row'. Use token or sequence"):
        importance_weights(*ARGS, level="row")


def test_weights_outside_of_two_bounds_are_0() -> None:
    """IcePop with its bounds of 0.5 and 5, which are included; NaN stays NaN."""
    rho = torch.tensor([[0.49, 0.5, 1.3, 5.0, 5.1, math.nan]], dtype=torch.float64)
    args, bounds = (rho.log(), torch.zeros_like(rho), torch.ones_like(rho)), {"threshold": 5.0, "threshold_lower": 0.5}
    found = importance_weights(*args, level="token", **bounds)
    assert found[0].tolist() == pytest.approx([0, 0.5, 1.3, 5, 0, math.nan], nan_ok=True)
    # row 0: the ratio is 4 * 1/2 = 2
    inside = importance_weights(*ARGS, level="sequence", threshold=2.1, threshold_lower=1.2)
    assert valid(inside) == pytest.approx([2, 2, 0])
    metrics = importance_metrics(*(part[:, :5] for part in args), level="token", **bounds)
    found = {name: metrics[f"rollout_corr/rollout_is_{name}"] for name in ("mean", "max", "min")}
    assert found == pytest.approx({"mean": 6.8 / 5, "max": 5, "min": 0})
    fractions = [metrics[f"rollout_corr/rollout_is_ratio_fraction_{side}"] for side in ("low", "high")]
    assert fractions == pytest.approx([1 / 5, 1 / 5])


def test_bounds_of_weights_as_verl_writes_them() -> None:
    assert [parse_weight_bounds(text) for text in (2.0, "2", "0.5_5.0")] == [(None, 2), (None, 2), (0.5, 5)]
    for wrong in ("", "0", "nan", "5_0.5", "0.5_", "1_2_3", "a_b"):
        with pytest.raises(ValueError, match=f"rollout_is_threshold: '{wrong}' is no bound of weights"):
            parse_weight_bounds(wrong)


def test_a_row_is_bounded_as_a_whole_not_token_by_token() -> None:
    """Its ratio is e^(30 - 29) = e: bounded before the sum, it would be e^(20 - 20) = 1."""
    log_probs, sampler = torch.tensor([[-1.0, -30.0]]).double(), torch.tensor([[-31.0, -1.0]]).double()
    mask = torch.ones(1, 2)
    weights = importance_weights(log_probs, sampler, mask, level="sequence", threshold=10.0)
    assert weights.tolist() == [pytest.approx([math.e, math.e])]
    metrics = off_policy_metrics(log_probs, sampler, mask)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.5)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(math.e**2 - 1)


def test_importance_metrics() -> None:
    metrics = importance_metrics(*ARGS, level="token", threshold=2.0)
    # 4, .5 and 1.1, truncated: 2, .5, 1.1, mean 1.2, squares 4 + .25 + 1.21 = 5.46; rows: 1.25 (2.25 before) and 1.1
    assert {key.removeprefix("rollout_corr/rollout_is_"): value for key, value in metrics.items()} == pytest.approx(
        {
            "mean": 1.2,
            "max": 2,
            "min": 0.5,
            "std": math.sqrt(5.46 / 3 - 1.44),
            "eff_sample_size": 1.44 / (5.46 / 3),
            "ratio_fraction_high": 1 / 3,
            "ratio_fraction_low": 0,
            "seq_mean": (1.25 + 1.1) / 2,
            "seq_std": 0.15 / math.sqrt(2),
            "seq_max": 1.25,
            "seq_min": 1.1,
            "seq_max_deviation": 0.25,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 0,
            "batch_norm_factor": 1.2,
        }
    )


def test_importance_metrics_of_rows() -> None:
    # Row weights 2, truncated to 1.5, and 1.1: mean 1.3, deviations .2 and .2.
    metrics = importance_metrics(*ARGS, level="sequence", threshold=1.5)
    assert {key.removeprefix("rollout_corr/rollout_is_"): value for key, value in metrics.items()} == pytest.approx(
        {
            "mean": 1.3,
            "max": 2,
            "min": 1.1,
            "std": 0.2,
            "eff_sample_size": 1.69 / ((2.25 + 1.21) / 2),
            "ratio_fraction_high": 1 / 2,
            "ratio_fraction_low": 0,
            "seq_mean": 1.3,
            "seq_std": 0.4 / math.sqrt(2),
            "seq_max": 1.5,
            "seq_min": 1.1,
            "seq_max_deviation": 0.5,
            "seq_fraction_high": 1 / 2,
            "seq_fraction_low": 0,
            "batch_norm_factor": 1.3,
        }
    )


def test_a_small_weight_is_not_held_up() -> None:
    """1/4 and 3/4 at threshold 2: nothing holds the first at 1/2, mean 1/2, deviations of 1/4."""
    metrics = importance_metrics(
        torch.tensor([[0.25, 0.75]]).log(), torch.zeros(1, 2), torch.ones(1, 2), level="token", threshold=2.0
    )
    found = {name: metrics[f"rollout_corr/rollout_is_{name}"] for name in ("std", "eff_sample_size", "min")}
    assert found == pytest.approx({"std": 0.25, "eff_sample_size": 0.25 / ((1 + 9) / 32), "min": 0.25})
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 1 / 2


@pytest.mark.parametrize(
    ("mode", "threshold", "kept"),
    [
        ("token_k1", "3", [0, 1, 1]),  # ratio within 1/3 .. 3
        ("token_k1", "0.2_1.5", [1, 0, 1]),  # bounds of 1 / rho, since k1 = -log rho
        ("token_k2", "0.5", [0, 1, 1]),  # .5 (log 4)^2 = .96; .24; .005
        ("token_k3", "1.0", [0, 1, 1]),  # 4 - 1 - log 4 = 1.61; .19; .005
        ("seq_sum_k1", "1.9", [0, 0, 1]),  # the row's product is 2
        ("seq_sum_k1", "2.1", [1, 1, 1]),
        ("seq_mean_k1", "1.3", [0, 0, 1]),  # square root of 2
        ("seq_mean_k1", "1.5", [1, 1, 1]),
        ("seq_sum_k2", "1.3", [1, 1, 1]),  # .961 + .240 = 1.201
        ("seq_sum_k2", "1.1", [0, 0, 1]),
        ("seq_mean_k2", "0.5", [0, 0, 1]),
        ("seq_sum_k3", "1.85", [1, 1, 1]),  # 1.614 + .193 = 1.807
        ("seq_sum_k3", "1.7", [0, 0, 1]),
        ("seq_mean_k3", "0.8", [0, 0, 1]),
        ("seq_max_k2", "0.9", [0, 0, 1]),
        ("seq_max_k3", "1.7", [1, 1, 1]),
        ("token_k1,seq_max_k3", "3,1.7", [0, 1, 1]),  # both have to agree
        ("token_k2,token_k3", "0.5", [0, 1, 1]),  # one threshold for both
    ],
)
def test_rejection(mode: str, threshold: str, kept: list[int]) -> None:
    # rho = 1/2 at the second token would sit on the bound of ratio 2; none of the cases does that.
    assert valid(rejection_mask(*ARGS, parse_rejection(mode, threshold))) == [bool(x) for x in kept]


def test_veto() -> None:
    assert valid(veto_mask(*ARGS, 0.6)) == [False, False, True]
    assert valid(veto_mask(*ARGS, 0.4)) == [True, True, True]
    far = torch.where(RHO == 0.5, -50.0, RHO.log())  # far below where ratios are bounded
    assert valid(veto_mask(far, *ARGS[1:], 1e-20)) == [False, False, True]


def test_rejection_metrics() -> None:
    metrics = rejection_metrics(*ARGS, parse_rejection("token_k1", 3.0))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)  # the empty row is no row
    assert metrics["rollout_corr/rollout_rs_token_k1_max"] == pytest.approx(LN(2))


@pytest.mark.parametrize(
    ("mode", "threshold", "message"),
    [
        ("token_k4", 2.0, "unknown mode 'token_k4'"),
        ("token_k1,token_k2", "1,2,3", "3 thresholds for 2 modes"),
        ("token_k2", "0.5_2", "no lower bound"),
        ("token_k2", "two", "positive number"),
        ("token_k2", -1.0, "positive number"),
        ("token_k2", "nan", "positive number"),
        ("token_k2", "inf", "positive number"),
        ("token_k2", math.nan, "rollout_rs_threshold is nan; expected a finite number"),
        ("token_k1", "0.5_inf", "positive number"),
        ("token_k1", "nan_2", "positive number"),
        ("token_k1, seq_max_k2,token_k1", "2", "token_k1 is named twice"),
        ("token_k1", 0.5, "lower bound 2 is above the upper one 0.5"),
    ],
)
def test_bad_rejection_settings(mode: str, threshold: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rejection(mode, threshold)


def test_off_policy_metrics() -> None:
    # Trainer: mean log-probs log(2)/2 and log(1.1); sampler: 0 and 0.
    metrics = off_policy_metrics(*ARGS)
    trainer = [-LN(2) / 2, -LN(1.1)]
    expected = {
        "training_ppl": (2**-0.5 + 1 / 1.1) / 2,
        "training_log_ppl": sum(trainer) / 2,
        "rollout_ppl": 1,
        "rollout_log_ppl": 0,
        "kl": -(LN(4) + LN(0.5) + LN(1.1)) / 3,
        "k3_kl": ((3 - LN(4)) + (-0.5 - LN(0.5)) + (0.1 - LN(1.1))) / 3,
        "log_ppl_diff": sum(trainer) / 2,
        "log_ppl_abs_diff": -sum(trainer) / 2,
        "log_ppl_diff_max": -LN(1.1),
        "log_ppl_diff_min": -LN(2) / 2,
        "ppl_ratio": (2**-0.5 + 1 / 1.1) / 2,
        "chi2_token": (16 + 0.25 + 1.21) / 3 - 1,
        "chi2_seq": (4 + 1.21) / 2 - 1,
    }
    assert metrics == pytest.approx({f"rollout_corr/{key}": value for key, value in expected.items()}, abs=1e-12)


@given(CASES)
@settings(max_examples=10, deadline=None)
def test_masked_poison_changes_nothing(case: Case) -> None:
    bounds = parse_rejection("token_k1,seq_mean_k2,seq_max_k3", "1.5,0.1,0.1")

    def everything(c: Case) -> list:
        arguments = (c.old_log_probs, c.rollout_log_probs, c.mask)
        levels = [importance_weights(*arguments, level=x, batch_normalize=True) for x in ("token", "sequence")]
        metrics = off_policy_metrics(*arguments), rejection_metrics(*arguments, bounds)
        return [x.tolist() for x in (*levels, rejection_mask(*arguments, bounds), veto_mask(*arguments, 0.5))] + [
            m.values() for m in metrics
        ]

    clean, poisoned = everything(case), everything(case.poisoned(math.nan))
    assert [list(x) for x in clean] == [list(x) for x in poisoned]
