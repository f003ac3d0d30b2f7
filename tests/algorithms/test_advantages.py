"""Numbers worked by hand, and what each estimator does in the corners."""

import math

import pytest
import torch
from torch import Tensor

from tether.algorithms import ADVANTAGE_ESTIMATORS, informative_rows, length_adaptive_lambda, masked_whiten

NAN = math.nan
GROUPED = [name for name in ADVANTAGE_ESTIMATORS if name not in ("gae", "reinforce_plus_plus", "remax", "raw")]


def estimate(name: str, rewards: list, mask: list, **keywords: object) -> tuple[Tensor, Tensor]:
    result = ADVANTAGE_ESTIMATORS[name](torch.tensor(rewards).double(), torch.tensor(mask).bool(), **keywords)
    return result.advantages, result.returns


def outcome(
    name: str, scores: list[float], uid: list[int], lengths: list[int] | None = None, **keywords: object
) -> list:
    """The advantage of each row's first token, for rows that are scored at their first token."""
    lengths = lengths or [1] * len(scores)
    width = max(lengths)
    rewards = [[score] + [0.0] * (width - 1) for score in scores]
    mask = [[1] * n + [0] * (width - n) for n in lengths]
    advantages, _ = estimate(name, rewards, mask, uid=torch.tensor(uid), **keywords)
    return [pytest.approx(x, abs=1e-5) for x in advantages[:, 0].tolist()]


# gamma = lam = 0.5. The observation at position 1 is skipped, its reward and value are not read.
# t=3: d = 4 - 2 = 2          A = 2
# t=2: d = 0 + .5*2 - 1 = 0   A = 0 + .25 * 2 = .5
# t=0: d = 1 + .5*1 - .5 = 1  A = 1 + .25 * .5 = 1.125
REWARDS, MASK = [[1.0, NAN, 0.0, 4.0, 9.0]], [[1, 0, 1, 1, 0]]
VALUES = torch.tensor([[0.5, 77.0, 1.0, 2.0, 55.0]]).double()
HALF = {"gamma": 0.5, "lam": 0.5, "values": VALUES, "normalize_advantages": False}


def test_gae() -> None:
    advantages, returns = estimate("gae", REWARDS, MASK, **HALF)
    assert advantages.tolist() == [[1.125, 0, 0.5, 2, 0]]
    assert returns.tolist() == [[1.625, 0, 1.5, 4, 0]]


def test_gae_whitens_after_the_returns() -> None:
    advantages, returns = estimate("gae", REWARDS, MASK, **HALF | {"normalize_advantages": True})
    raw = torch.tensor([[1.125, 0, 0.5, 2, 0]]).double()
    torch.testing.assert_close(advantages, masked_whiten(raw, torch.tensor(MASK)))
    assert returns.tolist() == [[1.625, 0, 1.5, 4, 0]]


def test_gae_bootstraps_truncated_rows() -> None:
    # t=3: d = 4 + .5*8 - 2 = 6. t=2: A = 0 + .25*6 = 1.5. t=0: A = 1 + .25*1.5 = 1.375. A row that ended: 0.
    keywords = HALF | {"values": VALUES.repeat(2, 1), "bootstrap_values": torch.tensor([8.0, 0.0]).double()}
    advantages, _ = estimate("gae", REWARDS * 2, MASK * 2, **keywords)
    assert advantages.tolist() == [[1.375, 0, 1.5, 6, 0], [1.125, 0, 0.5, 2, 0]]


def test_gae_with_a_lambda_for_the_critic_and_one_for_each_row() -> None:
    # critic_lam 1: A = 2, 0 + .5*2 = 1, 1 + .5*1 = 1.5; returns add V: 4, 2, 2. The advantages keep lam = .5.
    lam = torch.tensor([0.5]).double()
    advantages, returns = estimate("gae", REWARDS, MASK, **HALF | {"lam": lam}, critic_lam=1.0)
    assert advantages.tolist() == [[1.125, 0, 0.5, 2, 0]]
    assert returns.tolist() == [[2, 0, 2, 4, 0]]


def test_gae_of_a_perfect_critic_is_zero() -> None:
    # Reward 1 a token, gamma .9: V = 1 + .9 V'.
    values = torch.tensor([[1 + 0.9 * 1.9, 1.9, 1.0]], dtype=torch.float64)
    advantages, _ = estimate(
        "gae", [[1.0] * 3], [[1] * 3], values=values, gamma=0.9, lam=0.7, normalize_advantages=False
    )
    assert advantages.abs().max() < 1e-15


def test_length_adaptive_lambda() -> None:
    # 1 - 1 / (.5 n) for n = 4, 2, 1, 0: .5, 0, -1 -> 0, 0
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert length_adaptive_lambda(mask, alpha=0.5).tolist() == [0.5, 0, 0, 0]


def test_reinforce_plus_plus() -> None:
    # gamma .5: G = 1 + .5*0 + .25*4 = 2 over the policy's tokens, 0 + .5*4 = 2, 4. Whitened: mean 8/3, var 4/3.
    advantages, returns = estimate("reinforce_plus_plus", REWARDS, MASK, gamma=0.5)
    assert returns.tolist() == [[2, 0, 2, 4, 0]]
    std = math.sqrt(4 / 3)
    expected = torch.tensor([[-2 / 3 / std, 0, -2 / 3 / std, 4 / 3 / std, 0]]).double()
    torch.testing.assert_close(advantages, expected)


def test_remax() -> None:
    advantages, returns = estimate("remax", REWARDS, MASK, reward_baselines=torch.tensor([3.0]).double())
    assert returns.tolist() == [[5, 0, 4, 4, 0]]
    assert advantages.tolist() == [[2, 0, 1, 1, 0]]


def test_raw() -> None:
    assert estimate("raw", REWARDS, MASK)[0].tolist() == [[5, 0, 5, 5, 0]]
    assert estimate("raw", REWARDS, MASK, normalize_advantages=True)[0].tolist() == [[0] * 5]


# Two groups in mixed order and one of one: scores 1 and 3 (mean 2, std sqrt 2), 0 and 0, and 5 alone.
SCORES, UID = [1.0, 0.0, 3.0, 0.0, 5.0], [7, -2, 7, -2, 4]


@pytest.mark.parametrize(
    ("name", "keywords", "expected"),
    [
        ("grpo", {}, [-1 / math.sqrt(2), 0, 1 / math.sqrt(2), 0, 5]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [-1, 0, 1, 0, 5]),
        ("grpo_vectorized", {}, [-1 / math.sqrt(2), 0, 1 / math.sqrt(2), 0, 5]),
        ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, [-1, 0, 1, 0, 5]),
        ("grpo_passk", {}, [0, 0, math.sqrt(2), 0, 0]),  # lead 2 / sqrt 2; a tie; nobody to lead
        ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, [0, 0, 2, 0, 0]),
        ("rloo", {}, [1 - 3, 0, 3 - 1, 0, 5]),
        ("rloo_vectorized", {}, [1 - 3, 0, 3 - 1, 0, 0]),
        ("opo", {}, [-1, 0, 1, 0, 5]),
        ("gpg", {}, [-5 / 3, 0, 5 / 3, 0, 25 / 3]),  # alpha = 5 rows / 3 with a score
        ("gpg", {"f_norm": 2.0}, [-5 / 6, 0, 5 / 6, 0, 25 / 6]),
        # -1, 0, 1, 0, 5: mean 1, deviations -2, -1, 0, -1, 4, squares 22, variance 22 / 4
        ("reinforce_plus_plus_baseline", {}, [x / math.sqrt(5.5) for x in (-2, -1, 0, -1, 4)]),
    ],
)
def test_group_estimators(name: str, keywords: dict, expected: list[float]) -> None:
    assert outcome(name, SCORES, UID, **keywords) == expected


def test_opo_weighs_by_length() -> None:
    # Scores 1 and 4 on 1 and 2 tokens: baseline (1*1 + 2*4) / 3 = 3.
    assert outcome("opo", [1.0, 4.0], [0, 0], lengths=[1, 2]) == [-2, 1]


def test_grpo_vectorized_has_a_floor_under_the_std() -> None:
    # Deviations of 1e-4 have std 1.41e-4: grpo divides by it, the other by 1e-3.
    assert outcome("grpo", [0.0, 2e-4], [0, 0])[1] == pytest.approx(1e-4 / (math.sqrt(2) * 1e-4 + 1e-6), rel=1e-4)
    assert outcome("grpo_vectorized", [0.0, 2e-4], [0, 0])[1] == pytest.approx(1e-4 / (1e-3 + 1e-6), rel=1e-4)


def test_gdpo() -> None:
    # First component 0, 1 (normalised -+1/sqrt 2), second 5, 5 (normalised 0, 0), weights 2 and 9: -+sqrt 2.
    # Whitened over the two rows: mean 0, variance 2 + 2 = 4, so -+sqrt 2 / 2.
    keywords = {
        "reward_components": torch.tensor([[0.0, 5.0], [1.0, 5.0]]).double(),
        "component_weights": torch.tensor([2.0, 9.0]).double(),
    }
    assert outcome("gdpo", [NAN, NAN], [3, 3], **keywords) == [-math.sqrt(0.5), math.sqrt(0.5)]


def test_gdpo_tells_apart_what_grpo_collapses() -> None:
    """Rewards (0, 1), (1, 0) and (0, 0): GRPO on the sum sees two equal rows, GDPO sees which one is rare."""
    components = torch.tensor([[1.0, 0.0], [0.0, 10.0], [0.0, 0.0], [0.0, 10.0]]).double()
    got = outcome("gdpo", [0.0] * 4, [0] * 4, reward_components=components)
    scaled = outcome("gdpo", [0.0] * 4, [0] * 4, reward_components=components * torch.tensor([1.0, 0.1]).double())
    assert [x.expected for x in got] == [pytest.approx(x.expected, abs=1e-4) for x in scaled]


# Returns: row 0: 1, 1; row 1: 3. Sizes w: row 0: 1 - 2*.5 + .5 = .5 a token, W = .5, 1; row 1: 1 - 2*.25 + .5 = 1.
# b_0 = (1*.5 + 3*1) / 1.5 = 7/3. At position 1 row 0 is alone: b = 0 (or 1, without zero tail).
OTB = {
    "uid": torch.tensor([5, 5]),
    "old_log_probs": torch.tensor([[0.5, 0.5], [0.25, NAN]]).double().log(),
    "sum_pi_squared": torch.tensor([[0.5, 0.5], [0.5, NAN]]).double(),
}


def test_optimal_token_baseline() -> None:
    advantages, returns = estimate("optimal_token_baseline", [[0.0, 1.0], [3.0, NAN]], [[1, 1], [1, 0]], **OTB)
    assert returns.tolist() == [[1, 1], [3, 0]]
    torch.testing.assert_close(advantages, torch.tensor([[1 - 7 / 3, 1], [3 - 7 / 3, 0]]).double())
    without, _ = estimate(
        "optimal_token_baseline", [[0.0, 1.0], [3.0, NAN]], [[1, 1], [1, 0]], handle_zero_tail=False, **OTB
    )
    torch.testing.assert_close(without, torch.tensor([[1 - 7 / 3, 0], [3 - 7 / 3, 0]]).double())


def test_optimal_token_baseline_with_importance_weights() -> None:
    # rho = 2 on row 0: W = .5 * 4 = 2 at position 0, so b_0 = (1*2 + 3*1) / 3 = 5/3.
    weights = torch.tensor([[2.0, 2.0], [1.0, NAN]]).double()
    advantages, _ = estimate(
        "optimal_token_baseline", [[0.0, 1.0], [3.0, NAN]], [[1, 1], [1, 0]], rollout_is_weights=weights, **OTB
    )
    torch.testing.assert_close(advantages, torch.tensor([[1 - 5 / 3, 1], [3 - 5 / 3, 0]]).double())


def test_tir_optimal_token_baseline_aligns_policy_tokens() -> None:
    """Row 1 of the example above, moved behind an observation, is still compared with row 0's first token."""
    moved = {name: x.flip(-1) if name != "uid" else x for name, x in OTB.items()}
    moved = {name: torch.stack([OTB[name][0], moved[name][1]]) if name != "uid" else x for name, x in moved.items()}
    advantages, _ = estimate("tir_optimal_token_baseline", [[0.0, 1.0], [NAN, 3.0]], [[1, 1], [0, 1]], **moved)
    torch.testing.assert_close(advantages, torch.tensor([[1 - 7 / 3, 1], [0, 3 - 7 / 3]]).double())


def test_a_group_of_one_has_no_token_baseline() -> None:
    alone = OTB | {"uid": torch.tensor([5, 6])}
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages, returns = estimate(name, [[0.0, 1.0], [3.0, NAN]], [[1, 1], [1, 0]], **alone)
        assert torch.equal(advantages, returns)


def test_leave_one_out_does_not_cancel() -> None:
    # Others of the 0: .95 each. Others of a .95: six of .95 and a 0.
    scores = [0.0] + [0.95] * 7
    assert outcome("rloo", scores, [0] * 8) == [-0.95] + [0.95 - 6 * 0.95 / 7] * 7
    for name in ("grpo", "grpo_vectorized"):
        assert all(abs(x.expected) < math.sqrt(8) for x in outcome(name, scores, [0] * 8))


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("score", [0.1, 0.95, 1 / 3])
def test_equal_scores_give_exactly_zero(name: str, score: float) -> None:
    rewards = torch.full((7, 1), score, dtype=torch.float32)
    inputs = {"sum_pi_squared": torch.full((7, 1), 0.5), "old_log_probs": torch.full((7, 1), -1.0)}
    components = {"reward_components": torch.full((7, 2), score)}
    result = ADVANTAGE_ESTIMATORS[name](rewards, torch.ones(7, 1), uid=torch.zeros(7).long(), **inputs, **components)
    limit = 1e-6 if "token_baseline" in name else 0  # whose weighted mean has the 1e-8 of verl in it
    assert result.advantages.abs().max() <= limit


@pytest.mark.parametrize("name", GROUPED)
def test_a_failed_row_is_in_no_statistic(name: str) -> None:
    """A row without valid tokens, whatever it holds, leaves the others as they are without it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.rand(5, 3, generator=generator) for key in ("rewards", "sum_pi_squared", "reward_components")
    } | {"old_log_probs": -torch.rand(5, 3, generator=generator)}
    uid, mask = torch.tensor([0, 1, 0, 1, 0]), torch.ones(5, 3)
    mask[4] = 0
    for tensor in tensors.values():
        tensor[4] = NAN

    def run(rows: slice) -> Tensor:
        inputs = {key: tensor[rows] for key, tensor in tensors.items()}
        return ADVANTAGE_ESTIMATORS[name](inputs.pop("rewards"), mask[rows], uid=uid[rows], **inputs).advantages

    torch.testing.assert_close(run(slice(5))[:4], run(slice(4)))
    assert not run(slice(5))[4].any()


def test_informative_rows() -> None:
    # Group 0: 1 and 0. Group 1: equal. Group 2: its other score failed. Group 3: alone.
    scores = torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0, NAN, 1.0])
    mask = torch.tensor([[1]] * 5 + [[0]] + [[1]])
    uid = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    assert informative_rows(scores, mask, uid).tolist() == [True, True, False, False, False, False, False]
    scores[2:4] = torch.tensor([NAN, 0.0])  # of a valid row, which is not hidden
    assert informative_rows(scores, mask, uid)[2:4].all()
