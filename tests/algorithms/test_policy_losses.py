"""Numbers worked by hand for each loss, on one small batch of known ratios."""

import math

import pytest
import torch

from tether.algorithms import POLICY_LOSSES, TOKEN_SELECTIONS, TokenLoss, interpolate_proximal

LN = math.log
# The old log-probability is 0 everywhere, so that the ratio is exp(log_probs).
RATIO = torch.tensor([[1.5, 0.5, 1.1], [4.0, math.nan, math.nan]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, -1.0], [-1.0, math.nan, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
FIRST = torch.tensor([[1, 0, 0], [0, 0, 0]]).bool()
ROW0_MEAN = (LN(1.5) + LN(0.5) + LN(1.1)) / 3


def loss(name: str, **keywords: object) -> TokenLoss:
    return POLICY_LOSSES[name](RATIO.log(), torch.zeros_like(RATIO), ADVANTAGES, MASK, **keywords)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "keywords", "expected"),
    [
        # max(-3, -2.4); max(-1, -1.6); max(1.1, 1.1); max(4, 1.2) = 4, capped at 3
        ("vanilla", {}, [-2.4, -1, 1.1, 3]),
        ("vanilla", {"clip_ratio_c": None}, [-2.4, -1, 1.1, 4]),
        ("vanilla", {"clip_ratio_high": 0.4}, [-2.8, -1, 1.1, 3]),
        ("vanilla", {"clip_ratio_c": 10.0, "clip_ratio_low": 0.6}, [-2.4, -1, 1.1, 4]),
        # -clip(r) A log r
        ("cispo", {}, [-2.4 * LN(1.5), -1.6 * LN(0.5), 1.1 * LN(1.1), 1.2 * LN(4)]),
        ("gpg", {}, [-2 * LN(1.5), -2 * LN(0.5), LN(1.1), LN(4)]),
        # -A 4 / tau sigmoid(tau (r - 1)), tau = 1 for A > 0 and 1.05 else
        ("sapo", {}, [-8 * sigmoid(0.5), -8 * sigmoid(-0.5), 4 / 1.05 * sigmoid(0.105), 4 / 1.05 * sigmoid(3.15)]),
        ("sapo", {"tau_pos": 2.0, "tau_neg": 4.0}, [-4 * sigmoid(1), -4 * sigmoid(-1), sigmoid(0.4), sigmoid(12)]),
        # p_old is 1, so p moved by .5 (left out: A > 0), -.5 (A > 0: that way it may), .1 and 3; r = 4 is held at 3
        ("dppo_tv", {}, [0, -LN(0.5), 1.1 * LN(1.1), 3 * LN(4)]),
        ("dppo_tv", {"clip_ratio_high": 0.6, "clip_ratio_c": None}, [-3 * LN(1.5), -LN(0.5), 1.1 * LN(1.1), 4 * LN(4)]),
        # -A log r + beta / 2 (log r)^2
        ("dro", {"dro_beta": 0.5}, [LN(r) ** 2 / 4 - a * LN(r) for r, a in [(1.5, 2), (0.5, 2), (1.1, -1), (4, -1)]]),
        # The product of the first row is .825, the weight of its bad token; that of the second, 4, is held at 1.
        ("topr", {}, [-2 * LN(1.5), -2 * LN(0.5), 0.825 * LN(1.1), LN(4)]),
        ("clip_cov", {"selected": FIRST}, [0, -1, 1.1, 4]),
        ("m2po", {"selected": FIRST}, [0, -1, 1.1, 4]),
        ("kl_cov", {"selected": FIRST}, [-3 + 0.1 * LN(1.5), -1, 1.1, 4]),
        # The row's ratio is the geometric mean .938, inside the clip; row 1: max(4, 1.2), no dual clip.
        ("gspo", {}, [-2 * math.exp(ROW0_MEAN), -2 * math.exp(ROW0_MEAN), math.exp(ROW0_MEAN), 4]),
        ("gspo", {"clip_ratio_low": 0.01}, [-2 * math.exp(ROW0_MEAN), -2 * math.exp(ROW0_MEAN), 0.99, 4]),
        # log ratios .405 -> .2, -.693 stays, .0953 stays; mean advantage 1. Row 1: A < 0, nothing clipped.
        ("geo_mean", {}, [-math.exp((0.2 + LN(0.5) + LN(1.1)) / 3)] * 3 + [4]),
        ("bypass_mode", {}, [-2.4, -1, 1.1, 3]),
        ("bypass_mode", {"rollout_rs": {"token_k1": (1 / 3, 3.0)}}, [-2.4, -1, 1.1, 0]),
        ("bypass_mode", {"veto_threshold": 0.1}, [-2.4, -1, 1.1, 3]),
        ("bypass_mode", {"veto_threshold": 0.6}, [0, 0, 0, 3]),
        ("bypass_mode", {"loss_type": "reinforce"}, [-2 * LN(1.5), -2 * LN(0.5), LN(1.1), LN(4)]),
        # weights 1.5, .5, 1.1 and 4, truncated to 2
        (
            "bypass_mode",
            {"loss_type": "reinforce", "rollout_is": "token"},
            [-3 * LN(1.5), -LN(0.5), 1.1 * LN(1.1), 2 * LN(4)],
        ),
        # The sampler gave the first token half the probability of the proximal policy: weight 2.
        ("decoupled", {"rollout_log_probs": -LN(2) * FIRST.double()}, [-4.8, -1, 1.1, 3]),
        ("decoupled", {"rollout_log_probs": -LN(2) * FIRST.double(), "behave_weight_threshold": 1.5}, [0, -1, 1.1, 3]),
    ],
)  # fmt: skip
def test_loss_by_hand(name: str, keywords: dict, expected: list[float]) -> None:
    result = loss(name, **keywords).loss
    assert result[MASK.bool()].tolist() == pytest.approx(expected, rel=1e-12)
    assert not result[~MASK.bool()].any()


@pytest.mark.parametrize(
    "name",
    ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl", "dro", "topr", "m2po"],
)
def test_rollout_weights_multiply(name: str) -> None:
    weights = torch.tensor([[0.5, 2.0, 3.0], [0.25, math.nan, math.nan]], dtype=torch.float64)
    plain, weighted = loss(name, selected=FIRST), loss(name, selected=FIRST, rollout_is_weights=weights)
    torch.testing.assert_close(weighted.loss, plain.loss * weights.nan_to_num())


# A token's p_old, p and A, how far p moved, and its binary KL, as 0.5 ln(.5/.8) + 0.5 ln(.5/.2) = 0.223.
MOVED = [
    (0.5, 0.8, 1.0),  # by 0.3, KL 0.223, where A pushes it
    (0.5, 0.8, -1.0),  # as far, against A
    (0.01, 0.1, 1.0),  # by 0.09, KL 0.071, though r is 10
    (0.9, 0.6, -1.0),  # by -0.3, KL 0.226, where A pushes it
    (0.9, 0.75, -1.0),  # by -0.15, KL 0.072
    (0.9, 0.6, 1.0),  # by -0.3, against A
]


@pytest.mark.parametrize(
    ("name", "low", "high", "left_out"),
    [
        ("dppo_tv", 0.2, 0.2, {0, 3}),
        ("dppo_tv", 0.14, 0.2, {0, 3, 4}),
        ("dppo_tv", 0.4, 0.08, {0, 2}),
        ("dppo_kl", 0.2, 0.2, {0, 3}),
        ("dppo_kl", 0.0715, 0.0715, {0, 3, 4}),
        ("dppo_kl", 0.3, 0.07, {0, 2}),
        ("dppo_kl", 0.225, 0.225, {3}),
    ],
)
def test_dppo_leaves_out_tokens_that_moved_too_far(name: str, low: float, high: float, left_out: set[int]) -> None:
    old, p, advantages = torch.tensor(MOVED, dtype=torch.float64).T[:, None]
    result = POLICY_LOSSES[name](
        p.log(), old.log(), advantages, torch.ones(1, 6), clip_ratio_low=low, clip_ratio_high=high
    )
    # -min(r, 3) A log p; the r of 10 is held at 3
    losses = [-min(p / old, 3) * a * LN(p) for old, p, a in MOVED]
    assert result.loss[0].tolist() == pytest.approx([0 if i in left_out else x for i, x in enumerate(losses)])
    assert float(result.metrics["actor/pg_clipfrac"]) == pytest.approx(len(left_out) / 6)
    assert float(result.metrics["actor/pg_clipfrac_lower"]) == pytest.approx((2 not in left_out) / 6)


def test_rollout_weights_of_geo_mean_are_averaged_geometrically() -> None:
    weights = torch.tensor([[0.5, 2.0, 8.0], [0.25, math.nan, math.nan]], dtype=torch.float64)
    plain, weighted = loss("geo_mean"), loss("geo_mean", rollout_is_weights=weights)
    torch.testing.assert_close(weighted.loss, plain.loss * torch.tensor([[2.0], [0.25]], dtype=torch.float64))


def test_vanilla_metrics() -> None:
    metrics = {name: float(value) for name, value in loss("vanilla").metrics.items()}
    assert metrics == pytest.approx(
        {
            "actor/ppo_kl": -(LN(1.5) + LN(0.5) + LN(1.1) + LN(4)) / 4,
            "actor/ratio_mean": 7.1 / 4,
            "actor/ratio_max": 4,
            "actor/ratio_min": 0.5,
            "actor/pg_clipfrac": 1 / 4,
            "actor/pg_clipfrac_lower": 1 / 4,
        }
    )


@pytest.mark.parametrize(
    ("name", "metric", "expected"),
    [
        ("cispo", "actor/pg_clipfrac", 3 / 4),
        ("dppo_tv", "actor/pg_clipfrac", 1 / 4),
        ("dppo_tv", "actor/pg_clipfrac_lower", 1 / 4),
        ("clip_cov", "actor/pg_clipfrac", 1 / 4),
        ("m2po", "actor/pg_clipfrac", 1 / 4),
        ("kl_cov", "actor/ppo_kl_abs", (LN(1.5) + LN(2) + LN(1.1) + LN(4)) / 4),
        ("gspo", "actor/pg_clipfrac", 0),
        ("geo_mean", "actor/pg_clipfrac", 2 / 4),
        ("geo_mean", "actor/pg_clipfrac_lower", 1 / 4),
        ("bypass_mode", "actor/rejected", 0),
        ("decoupled", "actor/behave_weight_mean", 5 / 4),
    ],
)
def test_other_metrics(name: str, metric: str, expected: float) -> None:
    metrics = loss(name, selected=FIRST, rollout_log_probs=-LN(2) * FIRST.double()).metrics
    assert float(metrics[metric]) == pytest.approx(expected)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    far = torch.tensor([[500.0, -500.0]], requires_grad=True)
    ones = torch.ones(1, 2)
    result = POLICY_LOSSES[name](far, 0 * ones, ones, ones, selected=ones, rollout_log_probs=0 * ones)
    result.loss.sum().backward()
    assert far.grad is not None
    assert far.grad.isfinite().all()


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_logs_the_importance_weights(loss_type: str) -> None:
    """Ratios 1.5, 0.5, 1.1 and 4 in one batch: two above 1.2, which are truncated to it."""
    metrics = loss("bypass_mode", loss_type=loss_type, rollout_is="token", rollout_is_threshold=1.2).metrics
    found = {name: float(metrics[f"rollout_corr/rollout_is_{name}"]) for name in ("mean", "max", "min")}
    assert found == pytest.approx({"mean": (1.2 + 0.5 + 1.1 + 1.2) / 4, "max": 1.2, "min": 0.5})
    assert float(metrics["rollout_corr/rollout_is_ratio_fraction_high"]) == pytest.approx(2 / 4)
    assert "rollout_corr/rollout_is_mean" not in loss("bypass_mode", loss_type=loss_type).metrics
    bounds = {"rollout_is_threshold": 1.2, "rollout_is_threshold_lower": 0.6}
    bounded = loss("bypass_mode", loss_type=loss_type, rollout_is="token", **bounds)
    assert float(bounded.metrics["rollout_corr/rollout_is_mean"]) == pytest.approx(1.1 / 4)  # the others are 0
    assert int((bounded.loss != 0).sum()) == (1 if loss_type == "reinforce" else 4)


def test_bypass_refuses_an_unknown_loss_type() -> None:
    with pytest.raises(ValueError, match=r"unknown loss_type 'ppo'. Use ppo_clip or reinforce"):
        loss("bypass_mode", loss_type="ppo")


def test_interpolate_proximal() -> None:
    # Version 5 now. Sampled by 3: alpha = (5-1-3)/(5-3) = .5. By 1: 3/4. By 4: 0. By 5 and 6: 0.
    current, sampler = torch.ones(5, 1, requires_grad=True), torch.zeros(5, 1)
    version = torch.tensor([3, 1, 4, 5, 6])
    got = interpolate_proximal(current, sampler, sample_version=version, current_version=5)
    assert got[:, 0].tolist() == [0.5, 0.75, 0, 0, 0]
    assert not got.requires_grad


# Advantages 3, -1, -2 (mean 0) and log-probs -1, -2, -3 (mean -2): covariances 3, 0, 2.
COVARIANCE = {
    "log_probs": torch.tensor([[-1.0, -2.0, math.nan], [-3.0, math.nan, math.nan]]),
    "advantages": torch.tensor([[3.0, -1.0, math.nan], [-2.0, math.nan, math.nan]]),
    "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
}
A, B, C = (0, 0), (0, 1), (1, 0)


def chosen(name: str, **keywords: object) -> list[tuple]:
    keywords = {"old_log_probs": COVARIANCE["log_probs"], **COVARIANCE, **keywords}
    return [tuple(x) for x in TOKEN_SELECTIONS[name](**keywords).nonzero().tolist()]


def test_select_kl_cov() -> None:
    assert chosen("kl_cov") == [A]  # at least one
    assert chosen("kl_cov", kl_cov_ratio=0.7) == [A, C]
    assert chosen("kl_cov", kl_cov_ratio=1.0) == [A, B, C]
    assert chosen("kl_cov", response_mask=torch.zeros(2, 3)) == []


def test_select_m2po() -> None:
    """Of log ratios .1, .4, -.2 and -.3 that A pushes on, and .9 and -.9 against A: squares .01, .04, .09 and .16.

    Sorted, their means are .01, .025, .0467 and .075.
    """
    log_ratio = torch.tensor([[0.1, 0.4, 0.9, math.nan], [-0.2, -0.3, -0.9, 5.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 2.0, -1.0, math.nan], [-1.0, -3.0, 2.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])

    def select(**keywords: object) -> list[tuple]:
        selected = TOKEN_SELECTIONS["m2po"](log_ratio - 3, torch.full((2, 4), -3.0), advantages, mask, **keywords)
        return [tuple(x) for x in selected.nonzero().tolist()]

    small, large, middle, third = (0, 0), (0, 1), (1, 0), (1, 1)
    assert select() == [large, third]  # .025 is at most .04
    assert select(m2_threshold=0.05) == [large]
    assert select(m2_threshold=0.08) == []
    assert select(m2_threshold=0.02) == [large, middle, third]
    assert select(m2_threshold=0.0) == [small, large, middle, third]
    assert chosen("m2po", response_mask=torch.zeros(2, 3)) == []


def test_select_clip_cov() -> None:
    def select(**keywords: object) -> list[tuple]:
        return chosen("clip_cov", generator=torch.Generator().manual_seed(3), **keywords)

    assert select(clip_cov_ratio=1.0) == [A, C]
    assert select(clip_cov_ratio=1.0, clip_cov_lb=2.5) == [A]
    assert select(clip_cov_ratio=1.0, clip_cov_ub=2.5) == [C]
    assert select(clip_cov_lb=4.0) == []
    assert len(select()) == 1  # at least one, drawn among two
    assert select() == select()
    # Token A (advantage 3) has ratio e^.5 > 1.2: PPO clips it anyway.
    moved = COVARIANCE["log_probs"] - 0.5
    assert select(clip_cov_ratio=1.0, old_log_probs=moved) == [C]


def test_clip_cov_draws_each_candidate() -> None:
    draws = {chosen("clip_cov", generator=torch.Generator().manual_seed(s))[0] for s in range(20)}
    assert draws == {A, C}
