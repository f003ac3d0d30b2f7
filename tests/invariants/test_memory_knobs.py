"""Promise 1: how a mini-batch is cut into micro-batches, packed or recomputed changes no gradient."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.training.batches import ROWS, gradients, make_batch, make_critic, make_engine, make_policy
from tether.algorithms import AGGREGATIONS, KL_ESTIMATORS, count_valid, merge_metrics
from tether.batch import TrainBatch
from tether.models.backbone import enable_gradient_checkpointing
from tether.training.forward import PolicyModel, PolicyOutputs, ValueModel
from tether.training.losses import Aggregation, CriticLoss, PolicyLoss
from tether.training.micro_batches import MicroBatching
from tether.training.protocol import LossFunction, LossSizes, LossTerm

TOLERANCE = 1e-10
ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
KL_KINDS = [kind for kind in KL_ESTIMATORS if kind != "full"]  # that one is no loss of sampled tokens
ACTOR_CASES = list(zip(product(ESTIMATORS, AGGREGATIONS), cycle(KL_KINDS), strict=False))
WHOLE = MicroBatching(max_rows=ROWS)
SPLITS = [MicroBatching(max_rows=rows) for rows in (1, 2, 3)] + [
    MicroBatching(max_tokens=tokens)
    for tokens in (14, 30)  # the longest row has 16
]


class Setup:
    """The same weights with and without gradient checkpointing."""

    def __init__(self, make: Callable[[], PreTrainedModel]) -> None:
        self.plain = make().train()
        self.recomputing = make().train()
        enable_gradient_checkpointing(self.recomputing)


@pytest.fixture(scope="module")
def actor() -> Setup:
    return Setup(make_policy)


@pytest.fixture(scope="module")
def critic() -> Setup:
    return Setup(make_critic)


def accumulate(
    model: PreTrainedModel, batch: TrainBatch, loss: LossFunction, micro: MicroBatching, *, packed: bool = True
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and metrics of one mini-batch."""
    is_actor = model.get_output_embeddings() is not None
    forward = PolicyModel(model, 0.9, packed, with_entropy=True) if is_actor else ValueModel(model, packed)
    measured = make_engine(model, micro).accumulate_gradients(batch, forward, loss)
    return gradients(model), {name: float(metric) for name, metric in merge_metrics(measured).items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the size of the gradient, at the worst parameter."""
    assert found.keys() == expected.keys()
    assert all(gradient.norm() > 0 for gradient in expected.values())
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def policy_loss(aggregation: str = "token-mean", kl_kind: str = "k3") -> PolicyLoss:
    return PolicyLoss(
        options={"clip_ratio_high": 0.3},
        aggregation=Aggregation(aggregation),
        entropy_coeff=0.03,
        kl_coef=0.2,
        kl_kind=kl_kind,
    )


@pytest.mark.parametrize(("combination", "kl_kind"), ACTOR_CASES)
def test_the_actors_gradient(actor: Setup, critic: Setup, combination: tuple[str, str], kl_kind: str) -> None:
    estimator, aggregation = combination
    batch = make_batch(actor.plain, critic.plain, estimator)
    loss = policy_loss(aggregation, kl_kind)
    expected, metrics = accumulate(actor.plain, batch, loss, WHOLE)
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    for micro in SPLITS:
        found, split_metrics = accumulate(actor.plain, batch, loss, micro)
        assert distance(found, expected) < TOLERANCE
        assert split_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("huber_delta", [None, 0.3])
def test_the_critics_gradient(actor: Setup, critic: Setup, aggregation: str, huber_delta: float | None) -> None:
    batch = make_batch(actor.plain, critic.plain)
    loss = CriticLoss(0.4, huber_delta, Aggregation(aggregation))
    expected, metrics = accumulate(critic.plain, batch, loss, WHOLE)
    assert 0 < metrics["critic/vf_clipfrac"] < 1
    for micro in SPLITS:
        found, split_metrics = accumulate(critic.plain, batch, loss, micro)
        assert distance(found, expected) < TOLERANCE
        assert split_metrics == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recomputing", [True, False])
def test_packing_and_recomputing(actor: Setup, critic: Setup, role: str, packed: bool, recomputing: bool) -> None:
    setup, loss = (actor, policy_loss()) if role == "actor" else (critic, CriticLoss())
    batch = make_batch(actor.plain, critic.plain)
    expected, _ = accumulate(setup.plain, batch, loss, WHOLE)
    model = setup.recomputing if recomputing else setup.plain
    for micro in (WHOLE, *SPLITS):
        found, _ = accumulate(model, batch, loss, replace(micro, packed=packed), packed=packed)
        assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize(("which", "passes"), [("plain", 1), ("recomputing", 2)])
def test_recomputing_does_run_each_layer_again(actor: Setup, critic: Setup, which: str, passes: int) -> None:
    batch, model = make_batch(actor.plain, critic.plain), getattr(actor, which)
    calls = []
    # A pre-hook: the second pass stops as soon as it has what backward needs, which may be inside the layer.
    hook = model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    accumulate(model, batch, policy_loss(), WHOLE)
    hook.remove()
    assert len(calls) == passes


def mean_of_each_micro_batch(loss: PolicyLoss) -> LossFunction:
    """The legacy way: divide by the tokens of the micro-batch, and weigh micro-batches by their rows."""

    def legacy(outputs: PolicyOutputs, micro: TrainBatch, sizes: LossSizes) -> LossTerm:
        own = count_valid(micro.response_mask)
        term = loss(outputs, micro, LossSizes(int(own.num_tokens), int(own.num_sequences)))
        return LossTerm(term.loss * len(micro) / ROWS, term.metrics)

    return legacy


def test_a_mean_of_each_micro_batch_breaks_the_promise(actor: Setup, critic: Setup) -> None:
    """The negative control: these tests do see the bug that they are there for."""
    batch = make_batch(actor.plain, critic.plain)
    legacy = mean_of_each_micro_batch(policy_loss())
    expected, _ = accumulate(actor.plain, batch, policy_loss(), WHOLE)
    assert distance(accumulate(actor.plain, batch, legacy, WHOLE)[0], expected) < TOLERANCE
    for micro in SPLITS:
        assert distance(accumulate(actor.plain, batch, legacy, micro)[0], expected) > 1e-3


def test_rows_come_back_in_order_however_they_were_cut(actor: Setup, critic: Setup) -> None:
    batch = make_batch(actor.plain, critic.plain)
    engine, forward = make_engine(actor.plain), PolicyModel(actor.plain, with_entropy=True)
    whole = engine.infer(batch, forward)
    for micro in SPLITS:
        split = engine.infer(batch, forward, micro)
        torch.testing.assert_close(split.log_probs, whole.log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(split.entropy, whole.entropy, rtol=1e-12, atol=1e-12)
    actor.plain.train()
