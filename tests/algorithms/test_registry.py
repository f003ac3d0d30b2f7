import pytest
import torch
from jaxtyping import TypeCheckError

from tests.algorithms.cases import make_case
from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, REQUIRED_AGGREGATION, TOKEN_SELECTIONS, needs
from tether.algorithms.advantages.gae import gae

CASE = make_case(0)


def test_names() -> None:
    assert set(ADVANTAGE_ESTIMATORS) == {
        "gae", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gdpo", "optimal_token_baseline",
        "tir_optimal_token_baseline", "raw",
    }  # fmt: skip
    assert set(POLICY_LOSSES) == {
        "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl",
        "dro", "topr", "m2po", "bypass_mode", "decoupled",
    }  # fmt: skip
    assert set(REQUIRED_AGGREGATION) <= set(POLICY_LOSSES)
    assert {name for name, loss in POLICY_LOSSES.items() if "selected" in needs(loss)} == set(TOKEN_SELECTIONS)


def test_needs() -> None:
    assert needs(ADVANTAGE_ESTIMATORS["gae"]) == needs(gae) == {"values"}
    assert needs(ADVANTAGE_ESTIMATORS["raw"]) == set()
    assert needs(ADVANTAGE_ESTIMATORS["gdpo"]) == {"uid", "reward_components"}
    assert needs(POLICY_LOSSES["vanilla"]) == set()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_takes_the_same_keywords(name: str) -> None:
    options = {"gamma": 0.9, "lam": 0.95, "norm_adv_by_std_in_grpo": False, "normalize_advantages": True}
    result = ADVANTAGE_ESTIMATORS[name](CASE.rewards, CASE.mask, **CASE.estimator_inputs, **options)
    assert result.advantages.shape == result.returns.shape == CASE.mask.shape
    assert result.advantages.dtype == torch.float64


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_takes_the_same_keywords(name: str) -> None:
    options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, "tau_pos": 1.0, "ppo_kl_coef": 0.1}
    arguments = (CASE.log_probs, CASE.old_log_probs, CASE.advantages, CASE.mask)
    result = POLICY_LOSSES[name](*arguments, **CASE.loss_inputs, **options)
    assert result.loss.shape == CASE.mask.shape
    assert {"actor/ppo_kl", "actor/ratio_mean", "actor/ratio_max", "actor/ratio_min"} <= set(result.metrics)


def test_tensors_may_be_keywords() -> None:
    by_keyword = POLICY_LOSSES["vanilla"](
        log_probs=CASE.log_probs,
        old_log_probs=CASE.old_log_probs,
        advantages=CASE.advantages,
        response_mask=CASE.mask,
    )
    by_position = POLICY_LOSSES["vanilla"](CASE.log_probs, CASE.old_log_probs, CASE.advantages, CASE.mask)
    assert torch.equal(by_keyword.loss, by_position.loss)


def test_a_missing_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"gae needs values=\[B, T\]: the critic's estimate"):
        ADVANTAGE_ESTIMATORS["gae"](CASE.rewards, CASE.mask, uid=CASE.uid)
    with pytest.raises(ValueError, match=r"gdpo needs reward_components=.* and uid="):
        ADVANTAGE_ESTIMATORS["gdpo"](CASE.rewards, CASE.mask, uid=None)


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match=r"grpo: unknown keyword gama. Known: .*gamma"):
        ADVANTAGE_ESTIMATORS["grpo"](CASE.rewards, CASE.mask, uid=CASE.uid, gama=1.0)


def test_shapes_are_checked_in_tests_inside_the_package_too() -> None:
    with pytest.raises(TypeCheckError):
        gae(CASE.rewards, CASE.mask[:, 1:], values=CASE.values)
