"""Promise 3: masked positions do not exist. Whatever stands there changes no bit of weights, gradients or metrics."""

import math

import pytest
import torch
from torch import Tensor

from tests.training.batches import (
    ROWS,
    gradients,
    make_batch,
    make_critic,
    make_engine,
    make_policy,
    same_bits,
    weights,
    with_advantages,
)
from tether.batch import TrainBatch, filled
from tether.metrics.timing import Timer
from tether.rewards.summary import RewardReport
from tether.trainer.measure import sampler_metrics, step_metrics, value_metrics
from tether.training.forward import PolicyModel, PolicyOutputs, ValueModel
from tether.training.losses import CriticLoss, PolicyLoss
from tether.training.micro_batches import MicroBatching
from tether.training.protocol import LossSizes, LossTerm, UpdatePlan

POISONS = (math.nan, 1e9, math.inf)
ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
ACTOR_LOSS = PolicyLoss(entropy_coeff=0.03, kl_coef=0.2)
MICRO = MicroBatching(max_rows=2, packed=False)
TIMED = ("perf/", "timing_")


def poisoned(batch: TrainBatch, poison: float) -> TrainBatch:
    """The same batch with `poison` in every masked slot, and tokens that do not exist beyond every length."""
    changed = {}
    for name, tensor in batch.to_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            changed[name] = torch.where(batch.response_mask, tensor, poison)
    for name, length, token in (
        ("prompt_ids", batch.prompt_length, -7),
        ("response_ids", batch.response_length, 10**6),
    ):
        ids = getattr(batch, name)
        changed[name] = torch.where(torch.arange(ids.shape[1]) < length[:, None], ids, token)
    return TrainBatch.from_dict(batch.to_dict() | changed, batch_size=[ROWS])


def accumulate(batch: TrainBatch, role: str, packed: bool) -> dict[str, Tensor]:
    """Gradients, after both models have seen the mini-batch in micro-batches."""
    model = make_policy() if role == "actor" else make_critic()
    engine = make_engine(model, MICRO)
    if role == "actor":
        engine.accumulate_gradients(batch, PolicyModel(model, packed=packed, with_entropy=True), ACTOR_LOSS)
    else:
        engine.accumulate_gradients(batch, ValueModel(model, packed), CriticLoss())
    return gradients(model)


def train_step(batch: TrainBatch, estimator: str, poison: float | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """From old log-probs to updated weights and metrics; poison comes in again before the update."""
    batch = with_advantages(batch, estimator)
    if poison is not None:
        batch = poisoned(batch, poison)
    policy, critic = make_policy(), make_critic()
    plan = UpdatePlan(mini_batch_rows=4, epochs=2, shuffle=True)
    outputs = make_engine(policy).infer(batch, PolicyModel(policy, with_entropy=True))
    metrics = make_engine(critic, MICRO).update(batch, ValueModel(critic), CriticLoss(), plan, step=0)
    forward = PolicyModel(policy, with_entropy=True)
    metrics |= make_engine(policy, MICRO).update(batch, forward, ACTOR_LOSS, plan, step=0)
    time = Timer()
    time.seconds["step"] = 1.0
    report = RewardReport([0.0] * ROWS, ROWS - 1, 0, 1, (), {})
    metrics |= sampler_metrics(batch) | value_metrics(batch)
    metrics |= step_metrics(batch, outputs, report, time, max_prompt_length=7)
    learned = {f"policy.{k}": v for k, v in weights(policy).items()}
    learned |= {f"critic.{k}": v for k, v in weights(critic).items()}
    return learned, {name: value for name, value in metrics.items() if not name.startswith(TIMED)}


def test_every_field_is_poisoned() -> None:
    clean = make_batch(make_policy(), make_critic())
    dirty = poisoned(clean, math.nan)
    fields = ("advantages", "old_log_probs", "ref_log_probs", "returns", "rollout_log_probs")
    for name in (*fields, "token_level_rewards", "token_level_scores", "values"):
        assert filled(getattr(dirty, name)).isnan().equal(~clean.response_mask), name
    assert (dirty.response_ids == 10**6).any()
    assert (dirty.prompt_ids == -7).any()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_keep_every_bit(role: str, packed: bool, poison: float) -> None:
    """Here the row without a score goes through the model too."""
    batch = make_batch(make_policy(), make_critic())
    assert same_bits(accumulate(batch, role, packed), accumulate(poisoned(batch, poison), role, packed))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_training_step_keeps_every_bit(estimator: str) -> None:
    batch = make_batch(make_policy(), make_critic())
    expected_weights, expected_metrics = train_step(batch.clone(), estimator, None)
    assert all(math.isfinite(value) for value in expected_metrics.values())
    assert not same_bits(expected_weights, {f"policy.{k}": v for k, v in weights(make_policy()).items()})
    for poison in POISONS[:2]:
        found_weights, found_metrics = train_step(poisoned(batch, poison), estimator, poison)
        assert same_bits(found_weights, expected_weights)
        assert found_metrics == expected_metrics


def multiplied_by_the_mask(outputs: PolicyOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
    """The usual way to mask, here advantages that are centred first: 0 * NaN is NaN, and so is 0 * inf."""
    mask = batch.response_mask
    advantages = filled(batch.advantages) * mask
    centred = advantages - advantages.sum() / sizes.num_tokens
    ratio = (outputs.log_probs - filled(batch.old_log_probs)).exp()
    return LossTerm((-centred * ratio * mask).sum() / sizes.num_tokens, {})


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_multiplying_by_the_mask_breaks_the_promise(poison: float) -> None:
    """The negative control: poison does get through where a loss lets it."""
    policy = make_policy()
    batch = make_batch(policy, make_critic())
    engine = make_engine(policy)
    engine.accumulate_gradients(batch, PolicyModel(policy), multiplied_by_the_mask)
    assert all(gradient.isfinite().all() for gradient in gradients(policy).values())
    engine.accumulate_gradients(poisoned(batch, poison), PolicyModel(policy), multiplied_by_the_mask)
    assert not any(gradient.isfinite().all() for gradient in gradients(policy).values())
