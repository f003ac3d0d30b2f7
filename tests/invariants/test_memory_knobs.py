"""Promise 1: how a mini-batch is cut into micro-batches, packed or recomputed changes no gradient."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.pairwise import in_turn, pairwise_parameters
from tests.text.learning.batches import ROWS, gradients, make_batch, make_critic, make_engine, make_policy
from tether.algorithms import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, TOKEN_SELECTIONS, count_valid, merge_metrics
from tether.batch import TrainBatch
from tether.loop.engine import LossFunction, LossSizes, LossSpec, LossTerm
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
from tether.text.models.layers import enable_gradient_checkpointing

TOLERANCE = 1e-10
ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
MODES = (*AGGREGATIONS, "masked_mean_ratio")
KL_KINDS = tuple(KL_ESTIMATORS)
WHOLE = MicroBatching(max_rows=ROWS)
SPLITS = [
    MicroBatching(max_rows=1),
    MicroBatching(max_rows=2),
    MicroBatching(max_rows=3, packed=False),
    MicroBatching(max_rows=5),  # two steps of gradient accumulation
    MicroBatching(max_tokens=14),  # the longest row has 16
    MicroBatching(max_tokens=30, packed=False),
]

SELECTIONS = {
    "clip_cov": TokenSelection("clip_cov", {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.01}),
    "kl_cov": TokenSelection("kl_cov", {"kl_cov_ratio": 0.1}),
    "m2po": TokenSelection("m2po"),
}

NARROW = {
    "dppo_tv": {"clip_ratio_low": 3e-3, "clip_ratio_high": 3e-3},
    "dppo_kl": {"clip_ratio_low": 3e-4, "clip_ratio_high": 3e-4},
}
"""Clip ranges that bind for the small probabilities of a new model."""


class Case(NamedTuple):
    """A policy loss and an aggregation, with one of the KL kinds and one of the estimators."""

    loss: str
    mode: str
    kl_kind: str
    estimator: str


CASES = list(itertools.starmap(Case, in_turn(list(POLICY_LOSSES), MODES, KL_KINDS, ESTIMATORS)))


class Setup:
    """The same weights with and without gradient checkpointing."""

    def __init__(self, make: Callable[[], PreTrainedModel]) -> None:
        self.plain = make().train()
        self.recomputing = make().train()
        enable_gradient_checkpointing(self.recomputing)


@pytest.fixture(scope="module")
def actor() -> Setup:
    return Setup(lambda: make_policy(num_hidden_layers=1))


@pytest.fixture(scope="module")
def critic() -> Setup:
    return Setup(make_critic)


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(make_policy(seed=3, num_hidden_layers=1))


@pytest.fixture(scope="module")
def batches(actor: Setup, critic: Setup) -> dict[str, TrainBatch]:
    """By estimator; one row of each is fully masked."""
    return {estimator: make_batch(actor.plain, critic.plain, estimator) for estimator in ESTIMATORS}


def accumulate(
    model: PreTrainedModel,
    batch: TrainBatch,
    loss: LossFunction,
    micro: MicroBatching,
    *,
    reference: ReferenceModel | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and metrics of one mini-batch, its tokens selected first where the loss asks for it."""
    is_actor = model.get_output_embeddings() is not None
    policy = PolicyForward(0.9, micro.packed, with_entropy=True, with_full_kl=reference is not None)
    forward = policy if is_actor else ValueForward(micro.packed)
    engine, mini = make_engine(model, micro, reference=reference), batch.clone()
    if isinstance(loss, PolicyLoss) and loss.name in TOKEN_SELECTIONS:
        SELECTIONS[loss.name](mini, engine.infer(mini, forward), torch.Generator().manual_seed(0))
    measured, _ = engine.accumulate_gradients(mini, LossSpec(forward, loss))
    return gradients(model), {name: float(metric) for name, metric in merge_metrics(measured).items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the size of the gradient, at the worst parameter."""
    assert found.keys() == expected.keys()
    assert all(gradient.norm() > 0 for gradient in expected.values())
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def policy_loss(name: str = "vanilla", mode: str = "token-mean", kl_kind: str = "k3") -> PolicyLoss:
    return PolicyLoss(
        name=name,
        options=NARROW.get(name, {"clip_ratio_high": 0.3}),
        aggregation=Aggregation(mode),
        entropy_coeff=0.03,
        kl_coef=0.2,
        kl_kind=kl_kind,
    )


def half_of_the_splits(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return each case with one half of `SPLITS`, in turn, and with the other half as a slow test."""
    return [
        pytest.param(
            case, SPLITS[half::2], marks=() if i % 2 == half else pytest.mark.slow, id="-".join(map(str, (*case, half)))
        )
        for i, case in enumerate(cases)
        for half in (0, 1)
    ]


@pytest.mark.parametrize(("case", "splits"), half_of_the_splits(CASES))
def test_the_actors_gradient(
    actor: Setup, batches: dict[str, TrainBatch], reference: ReferenceModel, case: Case, splits: list[MicroBatching]
) -> None:
    batch, loss = batches[case.estimator], policy_loss(case.loss, case.mode, case.kl_kind)
    beside = reference if case.kl_kind == "full" else None
    expected, metrics = accumulate(actor.plain, batch, loss, WHOLE, reference=beside)
    assert 0 < metrics.get("actor/pg_clipfrac", 0.5) < 1
    for micro in splits:
        found, split_metrics = accumulate(actor.plain, batch, loss, micro, reference=beside)
        assert distance(found, expected) < TOLERANCE
        assert split_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("case", "splits"), half_of_the_splits(in_turn(MODES, (None, 0.3))))
def test_the_critics_gradient(
    critic: Setup, batches: dict[str, TrainBatch], case: tuple[str, float | None], splits: list[MicroBatching]
) -> None:
    mode, huber_delta = case
    loss = CriticLoss(0.4, huber_delta, Aggregation(mode))
    expected, metrics = accumulate(critic.plain, batches["gae"], loss, WHOLE)
    assert 0 < metrics["critic/vf_clipfrac"] < 1
    for micro in splits:
        found, split_metrics = accumulate(critic.plain, batches["gae"], loss, micro)
        assert distance(found, expected) < TOLERANCE
        assert split_metrics == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize(
    ("role", "packed", "recomputing"),
    pairwise_parameters(("actor", "actor-full-kl", "critic"), (True, False), (True, False)),
)
def test_packing_and_recomputing(
    actor: Setup,
    critic: Setup,
    batches: dict[str, TrainBatch],
    reference: ReferenceModel,
    role: str,
    packed: bool,
    recomputing: bool,
) -> None:
    setup, loss, beside = {
        "actor": (actor, policy_loss(), None),
        "actor-full-kl": (actor, policy_loss(kl_kind="full"), reference),
        "critic": (critic, CriticLoss(), None),
    }[role]
    expected, _ = accumulate(setup.plain, batches["gae"], loss, WHOLE, reference=beside)
    model = setup.recomputing if recomputing else setup.plain
    for micro in (WHOLE, *SPLITS[1:3]):
        found, _ = accumulate(model, batches["gae"], loss, replace(micro, packed=packed), reference=beside)
        assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize(("which", "passes"), [("plain", 1), ("recomputing", 2)])
def test_recomputing_does_run_each_layer_again(
    actor: Setup, batches: dict[str, TrainBatch], which: str, passes: int
) -> None:
    model, calls = getattr(actor, which), []
    # A pre-hook: the second pass stops as soon as it has what backward needs, which may be inside the layer.
    hook = model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    accumulate(model, batches["gae"], policy_loss(), WHOLE)
    hook.remove()
    assert len(calls) == passes


def mean_of_each_micro_batch(loss: PolicyLoss) -> LossFunction:
    """The legacy way: divide by the tokens of the micro-batch, and weigh micro-batches by their rows."""

    def legacy(outputs: PolicyOutputs, micro: TrainBatch, sizes: LossSizes) -> LossTerm:
        own = count_valid(micro.response_mask)
        term = loss(outputs, micro, LossSizes(int(own.num_tokens), int(own.num_sequences)))
        return LossTerm(term.loss * len(micro) / ROWS, term.metrics)

    return legacy


def test_a_mean_of_each_micro_batch_breaks_the_promise(actor: Setup, batches: dict[str, TrainBatch]) -> None:
    """The negative control: these tests do see the bug that they are there for."""
    legacy = mean_of_each_micro_batch(policy_loss())
    expected, _ = accumulate(actor.plain, batches["gae"], policy_loss(), WHOLE)
    assert distance(accumulate(actor.plain, batches["gae"], legacy, WHOLE)[0], expected) < TOLERANCE
    for micro in SPLITS:
        assert distance(accumulate(actor.plain, batches["gae"], legacy, micro)[0], expected) > 1e-3


def selected_in_each_micro_batch(loss: PolicyLoss) -> LossFunction:
    """The legacy way: rank the tokens of the micro-batch, which is what happens to be in memory."""

    def legacy(outputs: PolicyOutputs, micro: TrainBatch, sizes: LossSizes) -> LossTerm:
        mini = micro.clone()
        SELECTIONS[loss.name](mini, outputs, torch.Generator().manual_seed(0))
        return loss(outputs, mini, sizes)

    return legacy


@pytest.mark.parametrize("name", TOKEN_SELECTIONS)
def test_a_selection_in_each_micro_batch_breaks_the_promise(
    actor: Setup, batches: dict[str, TrainBatch], name: str
) -> None:
    """The negative control of the losses that treat some tokens apart."""
    legacy = selected_in_each_micro_batch(policy_loss(name))
    expected, _ = accumulate(actor.plain, batches["gae"], policy_loss(name), WHOLE)
    assert distance(accumulate(actor.plain, batches["gae"], legacy, WHOLE)[0], expected) < TOLERANCE
    for micro in SPLITS:
        assert distance(accumulate(actor.plain, batches["gae"], legacy, micro)[0], expected) > 1e-3


def test_rows_come_back_in_order_however_they_were_cut(actor: Setup, batches: dict[str, TrainBatch]) -> None:
    forward = PolicyForward(with_entropy=True)
    whole = make_engine(actor.plain).infer(batches["gae"], forward)
    for micro in SPLITS:
        split = make_engine(actor.plain, infer_micro=micro).infer(batches["gae"], forward)
        torch.testing.assert_close(split.log_probs, whole.log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(split.entropy, whole.entropy, rtol=1e-12, atol=1e-12)
    actor.plain.train()
