"""The part of each rank of a group in test_fsdp.py; started there by ``torch.multiprocessing``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tether.batch import TrainBatch
from tether.distributed import StoredWeights
from tether.distributed.weights import weight_chunks
from tether.loop.engine import LossSpec, OptimizerOptions, UpdatePlan, UpdateResult
from tether.text.learning.engines.fsdp import FsdpEngine, Sharding
from tether.text.learning.packing import (
    Assign,
    MicroBatching,
    MiniBatch,
    balanced,
    divide,
    mini_batches,
    sequence_lengths,
)

OPTIONS = OptimizerOptions(lr=1e-2)


def make_fsdp(model: Any, micro: MicroBatching, **options: Any) -> FsdpEngine[Any]:
    sharding = {field.name: options.pop(field.name) for field in fields(Sharding) if field.name in options}
    return FsdpEngine(model, micro, OPTIONS, sharding=Sharding(**sharding), **options)


def costs(batch: TrainBatch) -> list[float]:
    return sequence_lengths(batch).tolist()


def share(
    engine: FsdpEngine[Any], batch: TrainBatch, minis: list[MiniBatch], assign: Assign = balanced
) -> tuple[Tensor, list[MiniBatch]]:
    """The rows of this rank, which are those of all that share them, and its part of each mini-batch."""
    together = engine.sharding.sequence
    return divide(minis, costs(batch), dist.get_world_size() // together, assign)[dist.get_rank() // together]


def learn(engine: FsdpEngine[Any], batch: TrainBatch, loss: LossSpec, plan: UpdatePlan, step: int = 0) -> UpdateResult:
    """An update of which each rank gets its rows only."""
    minis = mini_batches(batch.response_mask, plan, step)
    rows, parts = share(engine, batch, minis)
    return engine.learn(batch[rows], loss, plan, parts, step)


def whole_gradients(
    engine: FsdpEngine[Any], batch: TrainBatch, loss: LossSpec, assign: Assign = balanced
) -> dict[str, Tensor]:
    """The gradient of the loss of all rows as one mini-batch."""
    plan = UpdatePlan(mini_batch_rows=len(batch))
    minis = mini_batches(batch.response_mask, plan, 0)
    rows, (part,) = share(engine, batch, minis, assign)
    engine.accumulate_gradients(batch[rows][part.rows], loss, part.sizes)
    grads = {name: p.grad for name, p in engine.model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items() if g is not None}


def whole_weights(engine: FsdpEngine[Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export().tensors}


def stored_weights(engine: FsdpEngine[Any]) -> dict[str, Tensor]:
    """As ranks of another group get them, in parts that the first rank stores; nothing on the others."""
    found: dict[str, Tensor] = {}
    for part, _ in weight_chunks(engine.whole_weights(), 4096):
        if dist.get_rank() == 0:
            found |= {name: tensor.clone() for name, tensor in StoredWeights.of(part).update(0).tensors}
    return found
