"""Promise 3: masked positions do not exist. Whatever stands there changes no bit of weights, gradients or metrics.

Here with models and engines; `test_masked_tensors` has every combination of the mathematics.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.pairwise import in_turn, pairwise_parameters
from tests.text.learning.batches import (
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
from tether.algorithms import ADVANTAGE_ESTIMATORS, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, TOKEN_SELECTIONS
from tether.batch import TrainBatch, filled
from tether.loop.alarms import sampler_metrics
from tether.loop.engine import LossSizes, LossSpec, LossTerm, UpdatePlan
from tether.metrics.timing import Timer
from tether.text.learning.advantages import value_metrics
from tether.text.learning.losses import (
    Aggregation,
    CriticLoss,
    PolicyForward,
    PolicyLoss,
    PolicyOutputs,
    ReferenceModel,
    TokenSelection,
    ValueForward,
)
from tether.text.learning.packing import MicroBatching
from tether.text.learning.rollouts import step_metrics
from tether.text.rewards.outcome import RewardReport

POISONS = (math.nan, 1e9, math.inf)
ACTOR_LOSS = PolicyLoss(entropy_coeff=0.03, kl_coef=0.2)
MICRO = MicroBatching(max_rows=2, packed=False)
TIMED = ("perf/", "timing_")
SELECTION = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.01, "kl_cov_ratio": 0.1}
SAME_SUMS = 1e-12


def poisoned(batch: TrainBatch, poison: float) -> TrainBatch:
    """The same batch with `poison` in every masked slot, and tokens that do not exist beyond every length."""
    changed, mask = {}, batch.response_mask
    for name, tensor in batch.to_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            per_token = tensor.shape == mask.shape
            alive = mask if per_token else mask.any(dim=-1).view(-1, *[1] * (tensor.ndim - 1))
            changed[name] = torch.where(alive, tensor, poison)
    for name, length, token in (
        ("prompt_ids", batch.prompt_length, -7),
        ("response_ids", batch.response_length, 10**6),
    ):
        ids = getattr(batch, name)
        changed[name] = torch.where(torch.arange(ids.shape[1]) < length[:, None], ids, token)
    return TrainBatch.from_dict(batch.to_dict() | changed, batch_size=batch.batch_size)


def widened(batch: TrainBatch, columns: int) -> TrainBatch:
    """The same batch with more padding behind the responses."""
    wider = {
        name: torch.nn.functional.pad(tensor, (0, columns))
        for name, tensor in batch.to_dict().items()
        if isinstance(tensor, Tensor) and tensor.shape == batch.response_mask.shape
    }
    return TrainBatch.from_dict(batch.to_dict() | wider, batch_size=batch.batch_size)


def with_a_dead_row(batch: TrainBatch) -> TrainBatch:
    """The same batch and a copy of its longest row, none of whose tokens count."""
    longest = int(batch.response_length.argmax())
    longer = batch[torch.tensor([*range(len(batch)), longest])].clone()
    longer.response_mask[-1], longer.scored[-1] = False, False
    return longer


def accumulate(batch: TrainBatch, role: str, packed: bool) -> dict[str, Tensor]:
    """Gradients, after both models have seen the mini-batch in micro-batches."""
    model = make_policy() if role == "actor" else make_critic()
    engine = make_engine(model, MICRO)
    if role == "actor":
        engine.accumulate_gradients(batch, LossSpec(PolicyForward(packed=packed, with_entropy=True), ACTOR_LOSS))
    else:
        engine.accumulate_gradients(batch, LossSpec(ValueForward(packed), CriticLoss()))
    return gradients(model)


@dataclass(frozen=True)
class Parts:
    """The parts of a training step, by their names, and what stands at its masked positions."""

    estimator: str
    loss: str
    kl_kind: str
    mode: str
    huber_delta: float | None

    poison: float

    def __str__(self) -> str:
        return "-".join(map(str, (self.estimator, self.loss, self.kl_kind, self.mode, self.poison)))


MODES = (*AGGREGATIONS, "masked_mean_ratio")
STEPS = in_turn(list(ADVANTAGE_ESTIMATORS), list(POLICY_LOSSES), list(KL_ESTIMATORS), MODES, (None, 0.3), POISONS[:2])


def train_step(batch: TrainBatch, parts: Parts, poison: float | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """From old log-probs to updated weights and metrics; poison comes in again before the update."""
    batch = with_advantages(batch, parts.estimator)
    if poison is not None:
        batch = poisoned(batch, poison)
    policy, critic = make_policy(num_hidden_layers=1), make_critic(num_hidden_layers=1)
    plan = UpdatePlan(mini_batch_rows=4, shuffle=True)
    outputs = make_engine(policy).infer(batch, PolicyForward(with_entropy=True))
    aggregation = Aggregation(parts.mode, width=12)
    value = CriticLoss(huber_delta=parts.huber_delta, aggregation=aggregation)
    metrics = make_engine(critic, MICRO).update(batch, LossSpec(ValueForward(), value), plan, step=0).metrics
    loss = PolicyLoss(parts.loss, {}, aggregation, entropy_coeff=0.03, kl_coef=0.2, kl_kind=parts.kl_kind)
    reference = ReferenceModel(make_policy(seed=3, num_hidden_layers=1)) if parts.kl_kind == "full" else None
    forward = PolicyForward(with_entropy=True, with_full_kl=reference is not None)
    chosen = TokenSelection(parts.loss, SELECTION) if parts.loss in TOKEN_SELECTIONS else None
    engine = make_engine(policy, MICRO, reference=reference)
    metrics |= engine.update(batch, LossSpec(forward, loss, chosen), plan, step=0).metrics
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
    assert not clean.response_mask.any(dim=-1).all()
    for name, tensor in clean.to_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            assert getattr(dirty, name).isnan().any(), name
    fields = ("advantages", "old_log_probs", "ref_log_probs", "returns", "rollout_log_probs")
    for name in (*fields, "token_level_rewards", "token_level_scores", "values"):
        assert filled(getattr(dirty, name)).isnan().equal(~clean.response_mask), name
    assert (dirty.response_ids == 10**6).any()
    assert (dirty.prompt_ids == -7).any()


@pytest.mark.parametrize(("role", "packed", "poison"), pairwise_parameters(("actor", "critic"), (True, False), POISONS))
def test_gradients_keep_every_bit(role: str, packed: bool, poison: float) -> None:
    """Here the row without a score goes through the model too."""
    batch = make_batch(make_policy(), make_critic())
    assert same_bits(accumulate(batch, role, packed), accumulate(poisoned(batch, poison), role, packed))


@pytest.mark.parametrize(
    ("role", "packed", "change"),
    pairwise_parameters(("actor", "critic"), (True, False), ("widened", "permuted", "with a dead row")),
)
def test_gradients_do_not_depend_on_padding_order_and_dead_rows(role: str, packed: bool, change: str) -> None:
    batch = make_batch(make_policy(), make_critic())
    changed = {
        "widened": widened(batch, 3),
        "permuted": batch[torch.tensor([4, 8, 0, 3, 7, 1, 6, 2, 5])],
        "with a dead row": with_a_dead_row(batch),
    }[change]
    expected, found = accumulate(batch, role, packed), accumulate(poisoned(changed, math.nan), role, packed)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < SAME_SUMS * gradient.norm(), name


@pytest.mark.parametrize("parts", itertools.starmap(Parts, STEPS), ids=str)
def test_a_training_step_keeps_every_bit(parts: Parts) -> None:
    batch = make_batch(make_policy(num_hidden_layers=1), make_critic(num_hidden_layers=1))
    expected_weights, expected_metrics = train_step(batch.clone(), parts, None)
    assert all(math.isfinite(value) for value in expected_metrics.values())
    assert not same_bits(expected_weights, {f"policy.{k}": v for k, v in weights(make_policy()).items()})
    found_weights, found_metrics = train_step(poisoned(batch, parts.poison), parts, parts.poison)
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
    engine.accumulate_gradients(batch, LossSpec(PolicyForward(), multiplied_by_the_mask))
    assert all(gradient.isfinite().all() for gradient in gradients(policy).values())
    engine.accumulate_gradients(poisoned(batch, poison), LossSpec(PolicyForward(), multiplied_by_the_mask))
    assert not any(gradient.isfinite().all() for gradient in gradients(policy).values())
