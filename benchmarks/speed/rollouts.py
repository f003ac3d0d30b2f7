"""Responses to learn from: sampled once by the model itself, so that their lengths are as ragged as they really are."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.speed.setting import Setting
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec, OptimizerOptions, UpdatePlan
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, PolicyLoss, PolicyOutputs
from tether.text.learning.packing import MicroBatching
from tether.text.models.layers import enable_gradient_checkpointing
from tether.text.sampling.engine import NativeEngine, eos_token_ids
from tether.text.sampling.protocol import NoiseKey, SamplingParams


def sampled_batch(setting: Setting, prompts: int, samples: int, limit: int) -> TrainBatch:
    """`samples` responses of up to `limit` tokens to each of `prompts` GSM8K prompts, with made-up advantages."""
    model = setting.our_model()
    engine = NativeEngine(model, eos_token_ids=eos_token_ids(model))
    rollout = engine.generate(setting.prompts(prompts), SamplingParams(limit, n=samples), NoiseKey(seed=0, step=0))
    batch = TrainBatch.assemble(rollout, torch.zeros(len(rollout)))
    batch.old_log_probs = batch.rollout_log_probs
    noise = torch.randn(len(rollout), 1, generator=torch.Generator().manual_seed(0))
    batch.advantages = noise.expand_as(batch.rollout_log_probs).contiguous()
    return batch


def as_rows(batch: TrainBatch) -> list[dict[str, Any]]:
    """The same rows as plain lists, for a peer in another process."""
    return [
        {"prompt": p[:m].tolist(), "response": r[:n].tolist(), "advantage": float(a[0])}
        for p, m, r, n, a in zip(
            batch.prompt_ids,
            batch.prompt_length.tolist(),
            batch.response_ids,
            batch.response_length.tolist(),
            batch.advantages if batch.advantages is not None else (),
            strict=True,
        )
    ]


class Updater:
    """tether's update of the policy: one optimizer step on all rows, as the trainer does it."""

    def __init__(self, setting: Setting, max_tokens: int, *, checkpointing: bool = False) -> None:
        self.model = setting.our_model(torch.float32)
        if checkpointing:
            enable_gradient_checkpointing(self.model)
        self.engine: LocalEngine[PolicyOutputs] = LocalEngine(
            self.model,
            MicroBatching(max_tokens=max_tokens),
            OptimizerOptions(lr=1e-6, weight_decay=0.0),
            compute_dtype=torch.bfloat16,
        )

    def __call__(self, batch: TrainBatch) -> None:
        """Update once."""
        self.engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(len(batch)), step=0)
