"""A policy that computes in bfloat16 (`policy.dtype`), with float32 weights in the optimizer, learns as in float32."""

import pytest
import torch

from tests.integrations.robots.vla.test_policy import KINDS, bins, look, make
from tests.integrations.robots.vla.test_policy import learner as learner_of
from tether.control.learning.losses import Samples
from tether.control.policies.mlp_policy import load_policy
from tether.control.policies.spec import PICTURE
from tether.loop.engine import OptimizerOptions


def seen(count):
    obs = look(count).float()
    obs[PICTURE] = obs[PICTURE].to(torch.uint8)
    return obs


def prepared(kind, dtype, **changes):
    policy = make(kind, dtype=dtype, value_width=0, **changes).float()
    return policy, learner_of(policy)


def rewarded(policy, count=8):
    """Half of the actions are rewarded."""
    obs, actions = seen(count), bins(count)
    advantages = torch.tensor([1.0] * (count // 2) + [-1.0] * (count // 2))[:, None].expand(-1, 4)
    return Samples(obs, actions, policy.log_probs(obs, actions).detach(), advantages)


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_in_bfloat16_and_its_scores_are_float32(kind):
    policy, _ = prepared(kind, "bfloat16")
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    outputs, _ = policy(seen(2), bins(2))
    assert outputs.dtype == torch.float32
    exact = make(kind, value_width=0).float()
    expected = exact(seen(2), bins(2))[0]
    assert torch.cosine_similarity(outputs, expected).min() > 0.99
    assert not torch.equal(outputs, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_float32_to_its_precision_whatever_the_micro_batch(kind):
    found = {}
    for name, dtype, micro_batch in (("exact", "float32", None), ("whole", "bfloat16", None), ("parts", "bfloat16", 3)):
        policy, made = prepared(kind, dtype)
        policy.micro_batch = micro_batch
        made.engine.gradients(rewarded(policy), made.loss.function)
        found[name] = made.engine._flat.grads.clone()
    assert found["whole"].dtype == torch.float32
    for name in ("whole", "parts"):
        assert torch.cosine_similarity(found[name], found["exact"], dim=0) > 0.99
        assert found[name].norm() == pytest.approx(float(found["exact"].norm()), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_as_in_float32_in_steps_that_bfloat16_would_lose(kind):
    """A bfloat16 number has 8 bits: a step of 1e-5 of weights around 0.2 changes none, but a hundred of them do."""
    change = {}
    for dtype in ("float32", "bfloat16"):
        policy, made = prepared(kind, dtype)
        made.engine._options = OptimizerOptions(lr=1e-5)
        given = rewarded(policy)
        first = made.engine._flat.values.clone()
        made.update(given, 0)
        moved = (made.engine._flat.values - first).abs()
        assert 0 < moved.max() < 1e-4
        for _ in range(99):
            made.update(given, 0)
        change[dtype] = policy.log_probs(given.obs, given.actions).detach() - given.old_log_probs
        if dtype == "bfloat16":
            for parameter, master in made.engine._flat._masters.items():
                assert torch.equal(parameter, master.bfloat16())
    good, bad = (change["bfloat16"][rows].mean() for rows in (slice(4), slice(4, 8)))
    assert good > 0 > bad
    for rows in (slice(4), slice(4, 8)):
        assert change["bfloat16"][rows].mean() == pytest.approx(float(change["float32"][rows].mean()), rel=0.25)


def test_files_hold_the_float32_weights(tmp_path):
    policy, made = prepared("openvla", "bfloat16")
    for _ in range(3):
        made.update(rewarded(policy), 0)
    made.engine.save(tmp_path / "policy")
    masters = made.engine._flat.values
    assert not torch.equal(masters, masters.bfloat16().float())
    loaded = load_policy(tmp_path / "policy")
    assert torch.equal(torch.cat([value.reshape(-1) for value in loaded.parameter_groups()[0]]), masters)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}  # as before


def test_what_adapters_leave_as_it_is_is_bfloat16_too():
    pytest.importorskip("peft")
    policy, made = prepared("openvla", "bfloat16", lora_rank=2)
    made.update(rewarded(policy), 0)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    assert made.engine._flat.values.numel() == sum(p.numel() for p in policy.parameters() if p.requires_grad)
