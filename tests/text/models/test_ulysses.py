"""Ranks that share each row of packed tokens compute what one process computes, in every class of model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.text.learning.batches import make_rollout
from tests.tiny import TINY_CONFIGS, tiny_model
from tether.batch import TrainBatch
from tether.text.learning.losses import PolicyForward
from tether.text.models.layers import use_tether_attention
from tether.text.models.ulysses import SequenceRanks, copies_of_keys

TOLERANCE = {"deepseek_v3": 1e-5, "qwen2_moe": 1e-5}  # experts are chosen, and weighted, in float32


def distances() -> dict[str, tuple[float, float]]:
    """How far log-probs and gradients are from those of one process, by class."""
    batch = TrainBatch.assemble(make_rollout(), torch.zeros(9))
    found = {}
    for name in TINY_CONFIGS:
        model = tiny_model(name, dtype=torch.float64)
        use_tether_attention(model)
        log_probs, grads = [], []
        for ranks in (None, SequenceRanks(dist.group.WORLD)):
            model.zero_grad()
            out = PolicyForward()(model, batch, ranks=ranks)
            (out.log_probs * torch.arange(out.log_probs.shape[1])).sum().backward()
            of_all = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            if ranks:
                for grad in of_all:
                    dist.all_reduce(grad)
            log_probs.append(out.log_probs.detach())
            grads.append(of_all)
        far = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(*reversed(grads), strict=True))
        found[name] = float((log_probs[1] - log_probs[0]).abs().max()), far
    return found


def test_every_class_computes_the_same_on_two_ranks(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 2, distances)
    assert found.keys() == TINY_CONFIGS.keys()
    far = {name: pair for name, pair in found.items() if not max(pair) < TOLERANCE.get(name, 1e-10)}
    assert far == {}


def test_key_heads_are_repeated_until_every_rank_has_its_own() -> None:
    """8 query heads: with 2 key heads, 4 ranks need 4; with 8, none is repeated."""
    assert [copies_of_keys(8, keys, 4) for keys in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert copies_of_keys(6, 2, 3) == 3  # no smaller number of copies goes into 3 ranks
    with pytest.raises(ValueError, match="8 attention heads cannot be split among 3 devices"):
        copies_of_keys(8, 2, 3)
