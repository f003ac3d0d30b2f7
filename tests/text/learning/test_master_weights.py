"""Sums of gradients over micro-batches, one after the other in the same memory."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tests.text.learning.batches import make_batch, make_critic, make_engine, make_policy
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec
from tether.text.learning.engines import master_weights
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import CriticLoss, PolicyForward, PolicyLoss, ValueForward
from tether.text.learning.packing import MicroBatching


def accumulate(engine: LocalEngine, batch: TrainBatch) -> list[torch.Tensor]:
    """The gradients of what is trained, as they are in memory."""
    is_actor = engine.model.get_output_embeddings() is not None
    forward, loss = (PolicyForward, PolicyLoss()) if is_actor else (ValueForward, CriticLoss())
    engine.accumulate_gradients(batch, LossSpec(forward(), loss))
    return [parameter.grad for parameter in engine.trained]


def bfloat16_engine(model: PreTrainedModel) -> LocalEngine:
    return make_engine(model.float(), MicroBatching(max_rows=2), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_nothing_of_the_last_sum_is_left(role: str) -> None:
    """The critic's head, which has no master beside it, included."""
    policy, critic = make_policy(), make_critic()
    batch = make_batch(policy, critic)
    model = policy if role == "actor" else critic
    used, fresh = (bfloat16_engine(copy.deepcopy(model)) for _ in range(2))
    first = accumulate(used, batch[:4])
    second = accumulate(used, batch[4:])
    expected = accumulate(fresh, batch[4:])
    assert all(a is b for a, b in zip(first, second, strict=True)), "new memory"
    assert all(a.equal(b) for a, b in zip(second, expected, strict=True))
    assert all(gradient.dtype == torch.float32 for gradient in second)


def test_a_parameter_that_nothing_came_from_has_no_gradient_left() -> None:
    policy = make_policy()
    engine = bfloat16_engine(policy)
    accumulate(engine, make_batch(make_policy(), make_critic()))
    assert engine.masters
    engine.masters.begin_gradients()
    engine.masters.finish_gradients()
    assert all(not parameter.grad.any() for parameter in engine.trained)


def test_gradients_are_added_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, critic = make_policy(), make_critic()
    batch = make_batch(policy, critic)
    whole, pieces = (bfloat16_engine(copy.deepcopy(policy)) for _ in range(2))
    expected = accumulate(whole, batch)
    monkeypatch.setattr(master_weights, "_CACHED", 7)
    assert all(a.equal(b) for a, b in zip(accumulate(pieces, batch), expected, strict=True))


def test_frozen_weights_have_no_master() -> None:
    """They are kept once, in the narrow dtype, and saved as float32 with exactly these values."""
    policy = make_policy()
    embeddings, *others = policy.float().parameters()
    embeddings.requires_grad_(False)
    engine = bfloat16_engine(policy)
    assert engine.masters
    assert len(engine.trained) == len(others)
    narrow = embeddings.data
    assert narrow.dtype == torch.bfloat16
    with engine.masters.installed():
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
        assert embeddings.equal(narrow.float())
    assert embeddings.data_ptr() == narrow.data_ptr()
    accumulate(engine, make_batch(policy, make_critic()))
    engine.masters.copy_to_model()
    assert embeddings.equal(narrow)
