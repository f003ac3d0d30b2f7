"""The engine's update: which rows, how many steps, at which rate, and what becomes of a gradient that is not finite."""

import copy
import math
from pathlib import Path

import pytest
import torch

from tests.text.learning.batches import (
    ROWS,
    UNSCORED,
    make_batch,
    make_critic,
    make_engine,
    make_policy,
    same_bits,
    weights,
)
from tether.batch import TrainBatch, filled
from tether.loop.engine import LossSizes, LossSpec, LossTerm, OptimizerOptions, UpdatePlan
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, PolicyLoss, PolicyOutputs, TokenSelection
from tether.text.learning.packing import MicroBatching

BAD_ROW = 3
ALL = UpdatePlan(mini_batch_rows=ROWS)


@pytest.fixture
def batch() -> TrainBatch:
    return make_batch(make_policy(), make_critic())


def update(engine: LocalEngine, batch: TrainBatch, plan: UpdatePlan = ALL, step: int = 0) -> dict[str, float]:
    return engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), plan, step).metrics


def optimizer_steps(engine: LocalEngine) -> int:
    assert engine.optimizer
    return int(max(state["step"] for state in engine.optimizer.state.values()))


@pytest.mark.parametrize(("rows", "epochs", "steps"), [(ROWS, 1, 1), (4, 1, 2), (3, 2, 6), (100, 3, 3)])
def test_one_optimizer_step_a_mini_batch(batch: TrainBatch, rows: int, epochs: int, steps: int) -> None:
    """Eight rows are left: the one without a score is taken out before rows are dealt out."""
    engine = make_engine(make_policy())
    metrics = update(engine, batch, UpdatePlan(rows, epochs))
    assert optimizer_steps(engine) == steps
    assert metrics["skipped_updates"] == 0
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.model.training


def test_without_a_row_to_learn_from_nothing_moves(batch: TrainBatch) -> None:
    """Not even by momentum or weight decay."""
    engine = make_engine(make_policy())
    update(engine, batch)
    before, steps = weights(engine.model), optimizer_steps(engine)
    batch.response_mask = torch.zeros_like(batch.response_mask)
    metrics = update(engine, batch)
    assert math.isnan(metrics["grad_norm"])
    assert same_bits(weights(engine.model), before)
    assert optimizer_steps(engine) == steps


def test_a_row_without_a_valid_token_is_left_out(batch: TrainBatch) -> None:
    whole, rest = make_engine(make_policy()), make_engine(make_policy())
    plan = UpdatePlan(mini_batch_rows=3, epochs=2, shuffle=True)
    found = update(whole, batch, plan)
    assert found == update(rest, batch[torch.arange(ROWS) != UNSCORED], plan)
    assert same_bits(weights(whole.model), weights(rest.model))


def test_the_rate_follows_the_training_step(batch: TrainBatch) -> None:
    engine = LocalEngine(make_policy(), MicroBatching(max_rows=4), OptimizerOptions(1e-2, warmup_steps=4))
    before = weights(engine.model)
    assert update(engine, batch, step=0)["lr"] == 0
    assert same_bits(weights(engine.model), before)
    assert update(engine, batch, step=1)["lr"] == 0.0025
    assert not same_bits(weights(engine.model), before)


def test_an_update_lowers_the_loss_and_clips_the_gradient(batch: TrainBatch) -> None:
    engine = make_engine(make_policy(), lr=1e-3)
    first = update(engine, batch)
    assert first["grad_norm"] > 0  # before clipping
    for _ in range(3):
        last = update(engine, batch)
    assert last["actor/pg_loss"] < first["actor/pg_loss"]


def test_state_taken_over_goes_on_bit_for_bit(batch: TrainBatch) -> None:
    first, second = make_engine(make_policy()), make_engine(make_policy())
    update(first, batch)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch hands out the tensors themselves
    assert update(first, batch, step=1) == update(second, batch, step=1)
    assert same_bits(weights(first.model), weights(second.model))


def test_infer_leaves_no_gradient_and_switches_to_eval(batch: TrainBatch) -> None:
    engine = make_engine(make_policy().train())
    outputs = engine.infer(batch, PolicyForward())
    assert not outputs.log_probs.requires_grad
    assert not engine.model.training


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_update_tells_what_the_model_gave_for_each_row(batch: TrainBatch, shuffle: bool) -> None:
    """When the row's turn first came: that of the second mini-batch is after an optimizer step."""
    engine = make_engine(make_policy(), MicroBatching(max_tokens=20))
    plan = UpdatePlan(mini_batch_rows=5, epochs=2, shuffle=shuffle)
    before = engine.infer(batch, PolicyForward()).log_probs
    found = engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), plan, 3).outputs.log_probs
    assert not found.requires_grad
    assert not found[UNSCORED].any()
    (learned,) = batch.response_mask.any(dim=-1).nonzero(as_tuple=True)
    first, second = (learned[rows] for rows in plan.mini_batches(len(learned), 3, 0))
    torch.testing.assert_close(found[first], before[first], rtol=1e-9, atol=1e-9)
    assert (found[second] - before[second]).abs().max() > 1e-3
    batch.response_mask = torch.zeros_like(batch.response_mask)
    assert engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), plan, 3).outputs is None


def test_without_old_log_probs_the_policy_is_its_own_old_one(batch: TrainBatch) -> None:
    engines = [make_engine(make_policy()) for _ in range(2)]
    batch.old_log_probs = engines[0].infer(batch, PolicyForward()).log_probs
    update(engines[0], batch)
    batch.old_log_probs = None
    metrics = update(engines[1], batch)
    assert metrics["actor/ratio_max"] == metrics["actor/ratio_min"] == 1
    for left, right in zip(engines[0].trained, engines[1].trained, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


def test_bfloat16_computes_beside_float32_master_weights(batch: TrainBatch) -> None:
    """Updates far below bfloat16's resolution add up in the masters, and the model follows them, rounded."""
    policy = make_policy(dtype=torch.float32)
    exact = make_engine(policy).infer(batch, PolicyForward()).log_probs
    engine = make_engine(policy, lr=1e-5, compute_dtype=torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    rounded = engine.infer(batch, PolicyForward()).log_probs
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.5
    before = [p.detach().clone() for p in engine.trained]
    for _ in range(4):
        assert update(engine, batch)["grad_norm"] > 0
    for parameter, master, start in zip(policy.parameters(), engine.trained, before, strict=True):
        assert master.dtype == torch.float32
        assert 2e-5 < (master - start).abs().max() < 5e-5
        assert torch.equal(parameter, master.to(torch.bfloat16))


def broken(batch: TrainBatch) -> TrainBatch:
    batch = batch.clone()
    filled(batch.advantages)[BAD_ROW, 0] = math.inf
    return batch


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_no_bit(
    batch: TrainBatch, tmp_path: Path, compute_dtype: torch.dtype | None
) -> None:
    policy = make_policy(dtype=torch.float32)
    engine = make_engine(policy, compute_dtype=compute_dtype, incident_dir=tmp_path / "incidents")
    update(engine, batch)  # so that the optimizer has a state to lose
    before, steps = weights(policy), optimizer_steps(engine)
    masters = [p.detach().clone() for p in engine.trained]
    moments = {i: state["exp_avg"].clone() for i, state in enumerate(engine.state_dict()["state"].values())}
    metrics = update(engine, broken(batch), UpdatePlan(ROWS, epochs=2), step=6)
    assert metrics["skipped_updates"] == 2
    assert math.isnan(metrics["grad_norm"])
    assert same_bits(weights(policy), before)
    assert all(torch.equal(p, kept) for p, kept in zip(engine.trained, masters, strict=True))
    assert optimizer_steps(engine) == steps
    for i, state in enumerate(engine.state_dict()["state"].values()):
        assert torch.equal(state["exp_avg"], moments[i])
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == ["step_7"]


def test_only_the_bad_mini_batch_is_skipped(batch: TrainBatch) -> None:
    """Rows 0, 1, 2 and 3, 4, 6 are the first two mini-batches: with the second broken, the others still count."""
    scored = batch[torch.arange(ROWS) != UNSCORED]
    plan = UpdatePlan(mini_batch_rows=3)
    engine, others = make_engine(make_policy()), make_engine(make_policy())
    metrics = update(engine, broken(scored), plan)
    assert metrics["skipped_updates"] == 1
    assert math.isfinite(metrics["grad_norm"])
    update(others, scored[torch.tensor([0, 1, 2, 6, 7])], plan)
    assert same_bits(weights(engine.model), weights(others.model))


def test_a_mini_batch_is_prepared_once_with_the_models_present_outputs(batch: TrainBatch) -> None:
    """Before it is cut, again in every epoch; what is filled in reaches every micro-batch and nothing else."""
    engine = make_engine(make_policy(), MicroBatching(max_rows=2))
    seen: list[tuple[int, float]] = []
    reached: list[TrainBatch] = []

    def prepare(mini: TrainBatch, outputs: PolicyOutputs, generator: torch.Generator) -> None:
        assert not outputs.log_probs.requires_grad
        torch.testing.assert_close(
            outputs.log_probs, PolicyForward()(engine.model, mini).log_probs.cpu(), rtol=1e-9, atol=1e-9
        )
        seen.append((len(mini), float(torch.rand((), generator=generator))))
        mini.selected = mini.response_mask

    def loss(outputs: PolicyOutputs, micro: TrainBatch, sizes: LossSizes) -> LossTerm:
        reached.append(micro)
        return PolicyLoss()(outputs, micro, sizes)

    plan = UpdatePlan(mini_batch_rows=5, epochs=2)
    engine.update(batch, LossSpec(PolicyForward(), loss, prepare), plan, 3)
    draws = [float(torch.rand((), generator=plan.generator(3, epoch, number))) for epoch in (0, 1) for number in (0, 1)]
    assert seen == list(zip([5, 3, 5, 3], draws, strict=True))
    assert all(torch.equal(filled(micro.selected), micro.response_mask) for micro in reached)
    assert batch.selected is None


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])
def test_a_selection_does_not_depend_on_the_micro_batches(batch: TrainBatch, name: str) -> None:
    found = []
    for micro in (MicroBatching(max_rows=ROWS), MicroBatching(max_rows=1), MicroBatching(max_tokens=14)):
        engine = make_engine(make_policy(), micro)
        selection = TokenSelection(name, {"clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1, "clip_cov_lb": 0.1})
        plan = UpdatePlan(mini_batch_rows=5, epochs=2)
        engine.update(batch, LossSpec(PolicyForward(), PolicyLoss(name), selection), plan, 0)
        found.append(weights(engine.model))
    for other in found[1:]:
        for key, weight in other.items():
            torch.testing.assert_close(weight, found[0][key], rtol=1e-7, atol=1e-9)  # Adam divides by small numbers


def test_a_policy_that_has_gone_too_far_makes_no_step(batch: TrainBatch) -> None:
    """Where the old log-probs are 1 lower, each ratio is e."""
    engine = make_engine(make_policy())
    outputs = engine.infer(batch, PolicyForward())
    near, far = batch.clone(), batch.clone()
    near.old_log_probs, far.old_log_probs = outputs.log_probs, outputs.log_probs - 1
    before = weights(engine.model)
    metrics = update(engine, far, UpdatePlan(ROWS, max_ratio=2.7))
    assert metrics["early_stops"] == 1
    assert same_bits(weights(engine.model), before)
    assert update(engine, far, UpdatePlan(ROWS, max_ratio=2.8))["early_stops"] == 0
    assert not same_bits(weights(engine.model), before)
    assert "early_stops" not in update(engine, near, UpdatePlan(ROWS))
