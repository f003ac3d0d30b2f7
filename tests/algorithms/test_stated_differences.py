"""tether's side of the differences that docs state: coming-from-verl.md, oracles.md and off-policy.md."""

import math

import pytest
import torch

from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    importance_metrics,
    parse_rejection,
    rejection_mask,
)


def test_importance_metrics_of_rows_count_each_row_once() -> None:
    # Weights 1.5 (one token) and 0.5 (three tokens). By row: mean 1, deviations .5 and .5, so std .5;
    # 1 / mean(w^2) = 1 / ((2.25 + .25) / 2) = .8. By token, as in verl: mean .75.
    log_ratio = torch.log(torch.tensor([[1.5, 1.0, 1.0], [0.5, 1.0, 1.0]]))
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    found = importance_metrics(log_ratio, torch.zeros_like(log_ratio), mask, level="sequence")
    names = ("mean", "std", "eff_sample_size")
    assert [found[f"rollout_corr/rollout_is_{name}"] for name in names] == pytest.approx([1.0, 0.5, 0.8])


def test_bounds_of_k1_are_of_the_inverse_ratio() -> None:
    # 1 / rho from 0.5 to 5: rho from 0.2 to 2.
    rho = torch.tensor([[0.19, 0.21, 1.9, 2.1, 4.9]])
    for mode in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
        rows = rho if mode == "token_k1" else rho.T
        kept = rejection_mask(rows.log(), torch.zeros_like(rows), torch.ones_like(rows), parse_rejection(mode, "0.5_5"))
        assert kept.flatten().tolist() == [False, True, True, False, False]


def test_the_return_is_carried_across_tool_output() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[1, 1, 0, 1]])
    assert ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](rewards, mask).returns.tolist() == [[1, 1, 0, 1]]


@pytest.mark.parametrize("zero_tail", [False, True])
def test_a_group_of_two_with_one_empty_row_is_a_group_of_one(zero_tail: bool) -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
    found = ADVANTAGE_ESTIMATORS["optimal_token_baseline"](
        rewards, mask, uid=[0, 0], old_log_probs=torch.full((2, 2), -1.0), sum_pi_squared=torch.full((2, 2), 0.3),
        handle_zero_tail=zero_tail,
    )  # fmt: skip
    assert found.advantages.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("name", ["kl_cov", "gspo"])
def test_ppo_kl_is_signed_and_of_log_ratios_within_20(name: str) -> None:
    # log r is -1, 2 and 50, held at 20: -mean = -7; their absolute mean is 23 / 3
    log_probs = torch.tensor([[-1.0, 2.0, 50.0]])
    zeros, mask = torch.zeros(1, 3), torch.ones(1, 3)
    metrics = POLICY_LOSSES[name](log_probs, zeros, zeros, mask, selected=mask).metrics
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(-7)
    if name == "kl_cov":
        assert float(metrics["actor/ppo_kl_abs"]) == pytest.approx(23 / 3)


def test_gdpo_whitens_over_tokens() -> None:
    # Before whitening the rows have +-a, with 1 and 3 tokens: over tokens the mean is -a / 2, over rows 0.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    components = torch.tensor([[1.0], [0.0]])
    found = ADVANTAGE_ESTIMATORS["gdpo"](torch.zeros(2, 3), mask, uid=[0, 0], reward_components=components).advantages
    assert found.sum() == pytest.approx(0, abs=1e-6)
    assert found[0, 0] == pytest.approx(3 * -found[1, 0].item())
    assert found[0, 0] == pytest.approx(math.sqrt(2.25))  # deviations 1.5 a and -0.5 a, three times; variance a^2
