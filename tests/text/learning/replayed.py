"""Batches with experts that tokens are sent to, whatever routers would choose."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.text.learning.batches import gradients, make_batch, make_critic, make_engine
from tests.text.learning.fsdp_ranks import make_fsdp, share, whole_gradients
from tests.text.learning.test_fsdp import FOUR_ROWS, LOSS, distance
from tests.tiny import tiny_model
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec, UpdatePlan
from tether.text.learning.losses import PolicyForward, PolicyLoss
from tether.text.learning.packing import mini_batches
from tether.text.models.layers import enable_gradient_checkpointing, use_tether_attention

EXPERTS, EACH = 4, 2
UNKNOWN_EVERY = 5
"""Every so many tokens of a row there is one whose experts nobody knows."""
REPLAYING = LossSpec(PolicyForward(with_entropy=True, experts="replayed"), PolicyLoss(entropy_coeff=0.03, kl_coef=0.2))


def make_mixture(name: str = "qwen2_moe", **overrides: Any) -> PreTrainedModel:
    """A policy whose layers have experts."""
    model = tiny_model(name, dtype=torch.float64, **overrides)
    use_tether_attention(model)
    return model


def any_experts(batch: TrainBatch, layers: int) -> TrainBatch:
    """The batch with experts drawn at random, for rows of a prompt alike in the prompt."""
    generator = torch.Generator().manual_seed(6)
    width = batch.prompt_ids.shape[1] + batch.response_ids.shape[1]
    drawn = torch.rand(len(batch), width, layers, EXPERTS, generator=generator).argsort(-1)[..., :EACH]
    _, group = batch.uid.unique(return_inverse=True)
    first = torch.stack([(batch.uid == uid).nonzero()[0, 0] for uid in batch.uid.unique()])[group]
    position = torch.arange(width)
    of_prompt = (position < batch.prompt_length[:, None])[..., None, None]
    drawn = torch.where(of_prompt, drawn[first], drawn)
    drawn[:, position % UNKNOWN_EVERY == 1] = -1
    beyond = position >= (batch.prompt_length + batch.response_length)[:, None]
    drawn[beyond] = -1
    changed = batch.clone()
    changed.routed_experts = drawn.to(torch.int16)
    return changed


def in_shards(sharding: dict[str, int]) -> dict[str, Any]:
    """On each rank: how far gradients with given experts are from those of one process, and those with the routers'
    own; and whether the ranks record the choice of one process.
    """
    batch = any_experts(make_batch(make_mixture(), make_critic()), layers=2)
    engine = make_engine(make_mixture())
    engine.accumulate_gradients(batch, REPLAYING)
    expected = gradients(engine.model)
    far = {}
    for recomputed in (False, True):
        model = make_mixture()
        if recomputed:
            enable_gradient_checkpointing(model)
        sharded = make_fsdp(model, FOUR_ROWS, **sharding)
        far[recomputed] = distance(whole_gradients(sharded, batch, REPLAYING), expected)
    sharded = make_fsdp(make_mixture(), FOUR_ROWS, **sharding)
    rows, _ = share(sharded, batch, mini_batches(batch.response_mask, UpdatePlan(len(batch)), 0))
    recorded = sharded.infer(batch[rows], PolicyForward(experts="recorded")).routed_experts
    with torch.no_grad():
        alone = PolicyForward(experts="recorded")(make_mixture(), batch[rows]).routed_experts
    chosen = distance(whole_gradients(make_fsdp(make_mixture(), FOUR_ROWS, **sharding), batch, LOSS), expected)
    return {"replayed": far, "chosen": chosen, "recorded": torch.equal(recorded, alone)}
