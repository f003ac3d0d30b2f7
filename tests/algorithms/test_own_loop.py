"""Common mistakes in a loop of one's own: live tensors, empty batches, NaN, and half precision."""

import inspect
import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.surface import CALLS, CASE, Call
from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    TOKEN_SELECTIONS,
    Advantages,
    RunningRewardNormalizer,
    TokenLoss,
    aggregate_loss,
    count_valid,
    episodic_gae,
    explained_variance,
    importance_metrics,
    importance_weights,
    parse_rejection,
    pf_ppo_indices,
    rejection_mask,
    value_loss,
    veto_mask,
)
from tether.algorithms.rollout_correction import REJECTION_MODES

TARGETS = [
    *ADVANTAGE_ESTIMATORS,
    *(f"select_{name}" for name in TOKEN_SELECTIONS),
    "episodic_gae",
    "discounted_sums",
    "masked_whiten",
    "normalize_rewards_per_batch",
    "RunningRewardNormalizer.normalize",
    "apply_kl_penalty",
    "importance_weights",
    "interpolate_proximal",
    "explained_variance",
]
"""Of these nothing may have a gradient: they make constants of the loss."""
LEARNS = {f"{name} loss": "log_probs" for name in POLICY_LOSSES} | {"value_loss": "values", "kl_penalty": "log_probs"}
"""Of these only one argument."""


def tensors_of(result: object) -> list[Tensor]:
    """Every tensor in a result, without metrics."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Advantages):
        return [result.advantages, result.returns]
    if isinstance(result, TokenLoss):
        return [result.loss]
    return [x for x in result if isinstance(x, Tensor)] if isinstance(result, tuple) else []


def live(call: Call) -> dict[str, Tensor]:
    """The floating-point tensors of a call, each with a gradient."""
    return {
        name: tensor.clone().requires_grad_() for name, tensor in call.tensors.items() if tensor.is_floating_point()
    }


def test_targets_have_no_gradient() -> None:
    live_targets = [
        name for name in TARGETS if any(x.requires_grad for x in tensors_of(CALLS[name](**live(CALLS[name]))))
    ]
    assert live_targets == []


def test_a_loss_has_the_gradient_of_what_learns_only() -> None:
    """With live values, GAE would train the critic through the policy's loss."""
    learning = {}
    for name in LEARNS:
        given = live(CALLS[name])
        tensors_of(CALLS[name](**given))[0].sum().backward()
        learning[name] = ", ".join(key for key, tensor in given.items() if tensor.grad is not None)
    assert learning == LEARNS


def test_verls_order_of_the_log_probs_is_refused() -> None:
    new = CASE.log_probs.clone().requires_grad_()
    for loss in POLICY_LOSSES.values():
        with pytest.raises(ValueError, match=r"old_log_probs has a gradient, and log_probs has none. The order is"):
            loss(CASE.old_log_probs, new, CASE.advantages, CASE.mask, **CASE.loss_inputs)


def test_the_same_live_tensor_twice_is_the_first_update() -> None:
    """The ratio is 1 and its gradient A, where a live old_log_probs would have cancelled it."""
    new = CASE.log_probs.clone().requires_grad_()
    for name, loss in POLICY_LOSSES.items():
        twice = loss(new, new, CASE.advantages, CASE.mask, **CASE.loss_inputs)
        once = loss(new, new.detach(), CASE.advantages, CASE.mask, **CASE.loss_inputs)
        (expected,) = torch.autograd.grad(once.loss.sum(), new)
        (found,) = torch.autograd.grad(twice.loss.sum(), new)
        assert torch.equal(found, expected), name
        assert found.any(), name


@pytest.mark.parametrize("empty", ["no row", "no position", "no row and no position"])
def test_an_empty_batch_gives_an_empty_result(empty: str) -> None:
    """Means and sums of nothing are 0, its smallest inf, its largest -inf; nothing raises and nothing is NaN."""
    rows, columns = (None if empty == "no position" else 0), (None if empty == "no row" else 0)
    sizes = {"B": rows, "T": columns, "#T": columns}
    for name, call in CALLS.items():
        changed = {
            key: tensor[tuple(slice(sizes.get(dim)) for dim in call.shapes[key])]
            for key, tensor in call.tensors.items()
        }
        if all(tensor.numel() for tensor in changed.values()):
            continue  # rows have no positions
        result = call(**changed)
        for tensor in tensors_of(result):
            assert tensor.numel() == 0 or tensor.ndim <= 1, name
            assert not tensor.isnan().any(), name
            assert not tensor.any(), name
        numbers = result if isinstance(result, dict) else result.metrics if isinstance(result, TokenLoss) else {}
        for key, number in numbers.items():
            extreme = key.endswith(("_max", "_min", "_diff_max", "_deviation"))
            assert not math.isnan(float(number)), (name, key)
            assert math.isfinite(float(number)) or extreme, (name, key)


def test_the_loss_of_nothing_has_a_gradient_of_zero() -> None:
    new = CASE.log_probs.clone().requires_grad_()
    nothing = torch.zeros_like(CASE.mask)
    loss = POLICY_LOSSES["vanilla"](new, CASE.old_log_probs, CASE.advantages, nothing).loss
    aggregate_loss(loss, nothing, "token-mean", **count_valid(nothing)._asdict()).backward()
    assert new.grad is not None
    assert not new.grad.any()


def test_there_is_no_row_to_draw() -> None:
    scores, nothing = torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="valid: none of 3 rows may be drawn"):
        pf_ppo_indices(scores, nothing, reweight_method="pow", generator=torch.Generator())


def test_a_reward_that_is_no_number_is_not_hidden() -> None:
    row, at = CASE.mask.nonzero()[-1].tolist()
    hidden = []
    for name, bad in itertools.product(ADVANTAGE_ESTIMATORS, (math.nan, math.inf)):
        call = CALLS[name]
        key = "reward_components" if name == "gdpo" else "token_level_rewards"
        changed = call.tensors[key].clone()
        changed[row, -1 if name == "gdpo" else at] = bad
        by_std = "norm_adv_by_std_in_grpo" in inspect.signature(ADVANTAGE_ESTIMATORS[name]).parameters
        for options in ({}, {"norm_adv_by_std_in_grpo": False}) if by_std else ({},):
            if call(**{key: changed}, **options).advantages[row, at].isfinite():
                hidden.append((name, bad, options))
    assert hidden == []


def test_an_input_that_is_no_number_is_not_hidden() -> None:
    row, at = CASE.mask.nonzero()[0].tolist()
    hidden = []
    for name, key in itertools.product(POLICY_LOSSES, ("log_probs", "advantages")):
        call = CALLS[f"{name} loss"]
        changed = call.tensors[key].clone()
        changed[row, at] = math.nan
        given = {"selected": torch.zeros_like(CASE.mask)} if "selected" in call.tensors else {}
        if not call(**{key: changed}, **given).loss[row, at].isnan():
            hidden.append((name, key))
    assert hidden == []


def test_nan_in_a_critic_is_not_hidden() -> None:
    values, returns, mask = torch.tensor([[1.0, math.nan]]), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
    assert explained_variance(values, returns, mask).isnan()
    assert explained_variance(returns, values, mask).isnan()
    assert explained_variance(values, torch.ones(1, 2), mask).isnan()
    assert value_loss(values, returns, returns, mask, cliprange_value=0.5, huber_delta=1.0).loss[0, 1].isnan()
    assert value_loss(returns, returns, values, mask, cliprange_value=0.5).loss[0, 1].isnan()


def test_a_ratio_that_is_no_number_is_vetoed_and_shows_in_the_weights() -> None:
    """NaN; but a token that neither policy can sample, -inf and -inf, is one on which both agree, and vetoed alone."""
    log_probs = torch.tensor([[-math.inf, -1.0], [-1.0, -1.0], [-1.0, math.nan]])
    sampler = torch.tensor([[-math.inf, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    mask = torch.ones(3, 2)
    assert veto_mask(log_probs, sampler, mask, 1e-4).tolist() == [[False] * 2, [True] * 2, [False] * 2]
    by_token = importance_weights(log_probs, sampler, mask, level="token")
    assert by_token.nan_to_num(9).tolist() == [[1, 1], [1, 1], [1, 9]]
    by_row = importance_weights(log_probs, sampler, mask, level="sequence")
    assert by_row.nan_to_num(9).tolist() == [[1, 1], [1, 1], [9, 9]]
    for mode in REJECTION_MODES:
        kept = rejection_mask(log_probs, sampler, mask, parse_rejection(mode, 2.0))
        assert kept[:2].all(), mode
        assert not kept[2, 1], mode
    metrics = importance_metrics(log_probs[:2], sampler[:2], mask[:2], level="token")
    assert {metrics[f"rollout_corr/rollout_is_{name}"] for name in ("mean", "max", "eff_sample_size")} == {1.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_episode_keeps_its_nan_to_itself(bad: float) -> None:
    """Episodes of steps 0-1, 2-4 and 5: what is wrong in one changes no bit of the others, in any of the inputs."""
    ends = torch.tensor([[0, 1, 0, 0, 1, 1]])
    episode = torch.tensor([0, 0, 1, 1, 1, 2])
    numbers = torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(0))
    clean = episodic_gae(*numbers, ends, torch.ones(1, 6), gamma=0.9, lam=0.8)
    for which, at in itertools.product(range(3), range(6)):
        spoilt = numbers.clone()
        spoilt[which, 0, at] = bad
        found = episodic_gae(*spoilt, ends, torch.ones(1, 6), gamma=0.9, lam=0.8)
        others = episode != episode[at]
        assert torch.equal(found.advantages[:, others], clean.advantages[:, others])
        assert torch.equal(found.returns[:, others], clean.returns[:, others])
        assert not found.advantages[0, at].isfinite()


def test_statistics_that_stay_are_not_spoilt_by_one_score() -> None:
    running = RunningRewardNormalizer()
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"scores: {wrong} in a valid row"):
            running.update(torch.tensor([1.0, wrong]), torch.tensor([True, True]))
        with pytest.raises(ValueError, match=f"scores: {wrong} in a valid row"):
            pf_ppo_indices(
                torch.tensor([1.0, wrong]), torch.tensor([True, True]), reweight_method="max_min",
                generator=torch.Generator(),
            )  # fmt: skip
    running.update(torch.tensor([1.0, math.nan]), torch.tensor([True, False]))
    assert running.mean == 1


def test_half_precision_is_computed_in_float32() -> None:
    """The same as with the rounded numbers in float32, to the bit, and of that type."""
    for name, call in CALLS.items():
        half = {key: x.bfloat16() for key, x in call.tensors.items() if x.is_floating_point()}
        generator = {"generator": torch.Generator().manual_seed(0)} if "generator" in call.keywords else {}
        expected = tensors_of(call(**{key: x.float() for key, x in half.items()}, **generator))
        if generator:
            generator["generator"].manual_seed(0)
        for wanted, found in zip(expected, tensors_of(call(**half, **generator)), strict=True):
            assert found.dtype == wanted.dtype, name
            assert torch.equal(found, wanted), name
