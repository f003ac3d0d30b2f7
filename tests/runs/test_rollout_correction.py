"""Rollout correction in the trainer: numbers by hand, the same gradient at every split, and whole runs."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runs.steps import first_step, stepped
from tests.runs.tiny_run import GAE, GRPO, LIGHT
from tests.text.learning.batches import ROWS, gradients, make_batch, make_critic, make_engine, make_policy
from tests.text.learning.test_losses import OUTPUTS, SIZES, batch, tokens
from tether.algorithms import importance_weights, parse_rejection
from tether.algorithms.rollout_correction import REJECTION_MODES
from tether.batch import RolloutBatch, TrainBatch, filled
from tether.config import load_config
from tether.config.schema.algorithm import RejectionMode
from tether.loop.engine import LossSpec
from tether.loop.parts import RolloutCorrection
from tether.metrics.keys import describe
from tether.text.learning.advantages import build_advantage_estimator
from tether.text.learning.losses import PolicyForward, PolicyLoss
from tether.text.learning.off_policy import build_rollout_correction, bypass_options
from tether.text.learning.packing import MicroBatching

CORRECTION = "algorithm.rollout_correction"
RHO = torch.tensor([[1.0, 0.5, 4.0], [1.1, 1.0, math.nan], [1.0, 1.0, 1.0]])


def recorded() -> TrainBatch:
    """p / p_sampler: 1, 1/2, 4 in a row of score 1; 1.1, 1 in one of score 0.5; and a row without a score."""
    length = torch.tensor([3, 2, 3])
    rollout = RolloutBatch(
        uid=torch.tensor([0, 0, 0]),
        prompt_ids=torch.ones(3, 1, dtype=torch.long),
        prompt_length=torch.ones(3, dtype=torch.long),
        response_ids=torch.ones(3, 3, dtype=torch.long),
        response_length=length,
        response_mask=torch.arange(3) < length[:, None],
        rollout_log_probs=torch.zeros(3, 3),
        truncated=torch.zeros(3, dtype=torch.bool),
        kept=None,
        batch_size=[3],
    )
    found = TrainBatch.assemble(rollout, torch.tensor([1.0, 0.5, math.nan]))
    found.old_log_probs = RHO.log()
    return found


def rows(tensor: Tensor | None) -> list[list[float]]:
    return filled(tensor).tolist()


@pytest.mark.parametrize(
    ("level", "normalize", "expected"),
    [
        ("token", False, [[1, 0.5, 2], [1.1, 1, 0]]),
        ("token", True, [[1 / 1.12, 0.5 / 1.12, 2 / 1.12], [1.1 / 1.12, 1 / 1.12, 0]]),  # mean 5.6 / 5
        ("sequence", False, [[2, 2, 2], [1.1, 1.1, 0]]),  # 1 * 1/2 * 4
        ("sequence", True, [[2 / 1.55] * 3, [1.1 / 1.55, 1.1 / 1.55, 0]]),
    ],
)
def test_weights(level: str, normalize: bool, expected: list[list[float]]) -> None:
    found = recorded()
    metrics = RolloutCorrection(level, 2.0, normalize).apply(found)
    assert filled(found.rollout_is_weights).numpy() == pytest.approx(np.array([*expected, [0, 0, 0]]))
    assert found.response_mask.tolist() == recorded().response_mask.tolist()
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2)
    assert all(describe(key) for key in metrics)


def test_weights_with_two_bounds_as_configured() -> None:
    settings = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.rollout.n=2"]
    wanted = [*settings, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold='0.6_3.0'"]
    correction = load_config(None, wanted).config.algorithm.rollout_correction
    build_rollout_correction(correction).apply(found := recorded())
    assert filled(found.rollout_is_weights).numpy() == pytest.approx(np.array([[1, 0, 0], [1.1, 1, 0], [0, 0, 0]]))
    assert found.response_mask.tolist() == recorded().response_mask.tolist()
    options = bypass_options(correction)
    assert (options["rollout_is_threshold_lower"], options["rollout_is_threshold"]) == (0.6, 3.0)


def test_the_optimal_baseline_counts_the_weights() -> None:
    """w = (1 - 2 / 4) rho^2: at the first token 1/2 and 0.605, so the baseline is (1/2 + 0.605 / 2) / 1.105."""
    found = recorded()
    RolloutCorrection("token", 2.0).apply(found)
    found.old_log_probs = torch.full((3, 3), 0.25).log()
    found.sum_pi_squared = torch.zeros(3, 3)
    found.token_level_rewards = found.token_level_scores
    settings = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.rollout.n=2"]
    config = load_config(None, [*settings, "algorithm.adv_estimator=optimal_token_baseline"])
    build_advantage_estimator(config.config.algorithm)(found)
    baseline = (0.5 + 0.605 / 2) / 1.105
    first = filled(found.advantages)[:, 0].tolist()
    assert first == pytest.approx([1 - baseline, 0.5 - baseline, 0], abs=1e-6)


def test_a_rejected_token_leaves_its_score_to_the_row() -> None:
    found = recorded()
    metrics = RolloutCorrection("sequence", 2.0, rejection=parse_rejection("token_k1", 3.0)).apply(found)
    assert found.response_mask.tolist() == [[True, True, False], [True, True, False], [False] * 3]
    assert rows(found.token_level_scores) == [[0, 1, 0], [0, 0.5, 0], [0, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    # the weight is still that of the whole response
    assert rows(found.rollout_is_weights)[0][:2] == pytest.approx([2, 2])
    assert all(describe(key) for key in metrics)


def test_a_rejected_row_leaves_altogether() -> None:
    found = recorded()
    RolloutCorrection(rejection=parse_rejection("seq_max_k3", 1.0)).apply(found)  # 4 - 1 - log 4 = 1.6
    assert found.response_mask.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    assert rows(found.token_level_scores) == [[0, 0, 0], [0, 0.5, 0], [0, 0, 0]]
    assert found.scored.tolist() == [False, True, False]
    assert found.rollout_is_weights is None


def test_veto() -> None:
    found = recorded()
    metrics = RolloutCorrection(veto_threshold=0.6).apply(found)
    assert found.response_mask.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    assert metrics == {"rollout_corr/rollout_token_veto_fraction": 0.5}
    found = recorded()
    found.old_log_probs = torch.where(RHO == 0.5, -100.0, RHO.log())  # far below where ratios are bounded
    RolloutCorrection(veto_threshold=1e-30).apply(found)
    assert found.response_mask.any(dim=-1).tolist() == [False, True, False]
    RolloutCorrection(veto_threshold=1e-44).apply(untouched := recorded())
    assert untouched.response_mask.any(dim=-1).tolist() == [True, True, False]


def test_the_configuration_knows_every_mode() -> None:
    assert get_args(RejectionMode) == REJECTION_MODES


def test_a_batch_without_a_score_is_left_alone() -> None:
    found = recorded()
    found.response_mask = torch.zeros_like(found.response_mask)
    assert RolloutCorrection("token", rejection=parse_rejection("token_k1", 3.0)).apply(found) == {}


def test_weights_multiply_the_loss_of_a_token_before_it_is_aggregated() -> None:
    weighted = batch()
    weighted.rollout_is_weights = tokens(0.5, 2.0, 1.5)
    term = PolicyLoss(entropy_coeff=0.1)(OUTPUTS, weighted, SIZES)
    policy = (-2.4 * 0.5 + 1.0 * 2.0 + 2.4 * 1.5) / 6  # the losses of test_losses.POLICY
    assert term.shares["actor/pg_loss"].item() == pytest.approx(policy)
    assert term.loss.item() == pytest.approx(policy - 0.1 * 0.9 / 6)  # entropy is not weighted


@pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.slow)])
def test_weights_give_the_same_gradient_at_every_split(level: str) -> None:
    policy = make_policy()
    weighted = make_batch(policy, make_critic())
    weighted.rollout_is_weights = importance_weights(
        filled(weighted.old_log_probs), weighted.rollout_log_probs, weighted.response_mask, level=level,
        batch_normalize=True,
    )  # fmt: skip
    found = []
    for size in (ROWS, 1, 2, 3):
        engine = make_engine(policy, MicroBatching(max_rows=size))
        engine.accumulate_gradients(weighted, LossSpec(PolicyForward(), PolicyLoss()))
        found.append(gradients(policy))
    for gradient in found[1:]:
        assert all(torch.allclose(gradient[name], found[0][name], rtol=1e-10, atol=1e-12) for name in gradient)
    weighted.rollout_is_weights = None
    engine.accumulate_gradients(weighted, LossSpec(PolicyForward(), PolicyLoss()))
    assert not torch.allclose(next(iter(gradients(policy).values())), next(iter(found[0].values())))


# --- whole runs ---------------------------------------------------------------------------------------------------

SAMPLER_IN_BF16 = ["actor_rollout_ref.rollout.dtype=bfloat16"]  # which makes a mismatch that can be seen
BYPASS = [f"{CORRECTION}.bypass_mode=True", "actor_rollout_ref.actor.use_kl_loss=False"]


def test_a_run_with_every_part_of_it(base: list[str]) -> None:
    settings = [
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_is_threshold=1.5",
        f"{CORRECTION}.rollout_is_batch_normalize=True",
        f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k3'",
        f"{CORRECTION}.rollout_rs_threshold='1.002,0.5'",
        f"{CORRECTION}.rollout_rs_threshold_lower=0.9",
        f"{CORRECTION}.rollout_token_veto_threshold=1e-4",
    ]
    plain_run = [*base, *GAE, *LIGHT, *SAMPLER_IN_BF16]
    metrics, plain = first_step([*plain_run, *settings]), first_step(plain_run)
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert metrics["rollout_corr/rollout_rs_seq_mean_k3_masked_fraction"] == 0
    assert metrics["rollout_corr/rollout_token_veto_fraction"] == 0
    assert 0.5 < metrics["rollout_corr/rollout_is_mean"] < 2
    assert not [key for key in metrics if describe(key) is None]
    assert plain["rollout_corr/chi2_seq"] == metrics["rollout_corr/chi2_seq"] != 0  # always measured
    assert plain["actor/grad_norm"] != metrics["actor/grad_norm"]
    assert "rollout_corr/rollout_is_mean" not in plain


def test_everything_rejected_is_no_update(base: list[str]) -> None:
    settings = [f"{CORRECTION}.rollout_rs=seq_max_k2", f"{CORRECTION}.rollout_rs_threshold=1e-30"]
    found = stepped([*base, *GRPO, *LIGHT, *SAMPLER_IN_BF16, *settings], 2)
    for metrics in found.metrics:
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
        assert math.isnan(metrics["actor/grad_norm"])
        assert "critic/score/mean" not in metrics


@pytest.mark.parametrize(
    "settings",
    [
        [
            f"{CORRECTION}.rollout_rs=token_k2",
            f"{CORRECTION}.rollout_rs_threshold=1e-6",
            f"{CORRECTION}.rollout_is=sequence",
        ],
        [f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token"],
        [f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_token_veto_threshold=0.999"],
    ],
    ids=["ppo_clip", "reinforce", "veto"],
)
def test_bypass_mode(settings: list[str], base: list[str]) -> None:
    first = first_step([*base, *GRPO, *LIGHT, *BYPASS, *SAMPLER_IN_BF16, *settings])
    assert first["rollout_corr/k3_kl"] > 0
    assert first["actor/entropy"] > 0
    if any("rollout_is=" in setting for setting in settings):  # logged by either loss, whatever the micro-batches
        assert first["rollout_corr/rollout_is_min"] < 1 < first["rollout_corr/rollout_is_max"]
    assert (first["actor/rejected"] > 0) == any("threshold" in setting for setting in settings)
    assert "training/rollout_probs_diff_max" not in first  # nothing was recomputed
    assert not [key for key in first if describe(key) is None]
