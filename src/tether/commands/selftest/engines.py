"""Checks of one update: the first ratio is 1, gradients do not depend on memory settings, out-of-memory is handled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.batch import TrainBatch
from tether.commands.selftest.kernels import sampled_batch
from tether.commands.selftest.results import (
    CheckContext,
    CheckOutcome,
    failed,
    passes_if,
    random_model,
    relative_distance,
)
from tether.loop.engine import Learner, LossSpec, OptimizerOptions, UpdatePlan
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, PolicyLoss, PolicyOutputs
from tether.text.learning.packing import MicroBatching
from tether.text.models.layers import enable_gradient_checkpointing, use_tether_attention

ROWS = 12


def first_ratio(context: CheckContext) -> CheckOutcome:
    """Sample, score the same rows in other micro-batches, and check the ratio of the first optimizer step."""
    model = random_model(device=context.device)
    narrow = None if context.dtype == torch.float32 else context.dtype
    batch = sampled_batch(model)
    learner = _learner(model, narrow)
    batch.old_log_probs = learner.infer(batch).log_probs
    batch.advantages = _advantages(batch)
    metrics = learner.update(batch, step=0).metrics
    lowest, highest = (metrics[f"actor/first_update/ratio_{end}"] for end in ("min", "max"))
    limit = 1e-4 if narrow is None else 0.1
    gap = float((batch.rollout_log_probs - batch.old_log_probs)[batch.response_mask].abs().max())
    detail = (
        f"ratios from {lowest:.6f} to {highest:.6f} in {context.dtype}; sampler and trainer differ by {gap:.1g} nats"
    )
    return passes_if(max(abs(lowest - 1), abs(highest - 1)) <= limit and gap <= limit, detail)


def memory_settings(context: CheckContext) -> CheckOutcome:
    """Compare a mini-batch's gradients for several micro-batch sizes, layouts and checkpointing, in float64."""
    batch = _scored_batch()
    expected = _gradients(context, batch, MicroBatching(max_rows=ROWS))
    settings = {
        "micro-batches of one row": (MicroBatching(max_rows=1), False),
        "padded micro-batches of three rows": (MicroBatching(max_rows=3, packed=False), False),
        "micro-batches of 40 tokens": (MicroBatching(max_tokens=40), False),
        "gradient checkpointing": (MicroBatching(max_rows=5), True),
    }
    distances = {
        name: relative_distance(_gradients(context, batch, micro, checkpointing=recompute), expected)
        for name, (micro, recompute) in settings.items()
    }
    worst = max(distances, key=distances.__getitem__)
    return passes_if(
        distances[worst] <= 1e-9,
        f"gradients in float64 differ by at most {distances[worst]:.1g} of their size ({worst})",
    )


def out_of_memory(context: CheckContext) -> CheckOutcome:
    """Make the allocator refuse micro-batches of more than two rows, and check gradients and the message."""
    batch = _scored_batch()
    expected = _gradients(context, batch, MicroBatching(max_rows=ROWS))
    with _warnings() as messages:
        halved = _gradients(context, batch, MicroBatching(max_rows=ROWS), rows_that_fit=2)
    distance = relative_distance(halved, expected)
    if not any("did not fit into memory" in message for message in messages):
        return failed("micro-batches were split without a warning that names the setting")
    return passes_if(distance <= 1e-9, f"micro-batches were halved until they fit; gradients differ by {distance:.1g}")


def _learner(model: PreTrainedModel, narrow: torch.dtype | None) -> Learner[TrainBatch, PolicyOutputs]:
    engine: LocalEngine[PolicyOutputs] = LocalEngine(
        model,
        MicroBatching(max_rows=2, packed=False),
        OptimizerOptions(lr=1e-3),
        infer_micro=MicroBatching(max_tokens=40),
        compute_dtype=narrow,
    )
    return Learner(
        engine=engine,
        forward=PolicyForward(with_entropy=True),
        loss=LossSpec(PolicyForward(packed=False), PolicyLoss()),
        plan=UpdatePlan(mini_batch_rows=ROWS),
    )


def _scored_batch() -> TrainBatch:
    """Return a batch whose old policy differs enough that some ratios are clipped."""
    batch = sampled_batch(random_model())
    noise = torch.randn(batch.rollout_log_probs.shape, generator=torch.Generator().manual_seed(1))
    batch.old_log_probs = batch.rollout_log_probs + 0.3 * noise
    batch.advantages = _advantages(batch)
    return batch


def _advantages(batch: TrainBatch) -> Tensor:
    drawn = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(batch.response_mask, drawn, 0.0)


def _gradients(
    context: CheckContext,
    batch: TrainBatch,
    micro: MicroBatching,
    *,
    checkpointing: bool = False,
    rows_that_fit: int = ROWS,
) -> Tensor:
    """Return the gradients of all weights as one vector."""
    # Metal has no float64.
    device = torch.device("cpu") if context.device.type == "mps" else context.device
    model = random_model(dtype=torch.float64, device=device)
    use_tether_attention(model)
    if checkpointing:
        model.train()
        enable_gradient_checkpointing(model)
    policy = PolicyForward(packed=micro.packed)

    def forward(model: PreTrainedModel, rows: TrainBatch, reference: object) -> PolicyOutputs:
        if len(rows) > rows_that_fit:
            torch.empty(2**60)  # makes the allocator really fail
        return policy(model, rows)

    engine: LocalEngine[PolicyOutputs] = LocalEngine(model, micro, OptimizerOptions(lr=1e-3))
    engine.accumulate_gradients(batch.clone(), LossSpec(forward, PolicyLoss()))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings that tether logs."""
    messages: list[str] = []

    class MessageHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector, logger = MessageHandler(logging.WARNING), logging.getLogger("tether")
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
