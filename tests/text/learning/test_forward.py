"""The policy's and the critic's outputs against transformers' own forward, one row at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.text.learning.batches import UNSCORED, make_batch, make_critic, make_engine, make_policy
from tests.tiny import tiny_model
from tether.text.learning.losses import PolicyForward, ReferenceModel, ValueForward
from tether.text.learning.packing import MicroBatching, token_rows
from tether.text.models.full_kl import TopK
from tether.text.models.layers import enable_gradient_checkpointing
from tether.text.models.lora import LoraOptions, adapter_off, add_lora
from tether.text.models.output import value_head_of, values_from_hidden

TOLERANCE = {"rtol": 0, "atol": 1e-5}  # transformers' rotary embedding and softmax are float32 even in a float64 model


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_are_those_of_transformers(packed: bool, temperature: float) -> None:
    policy = make_policy()
    batch = make_batch(policy, make_critic())
    with torch.no_grad():
        found = PolicyForward(temperature, packed, with_entropy=True, with_sum_pi_squared=True)(policy, batch)
    theirs = tiny_model("llama", dtype=torch.float64)
    for row, (p, r) in enumerate(zip(batch.prompt_length.tolist(), batch.response_length.tolist(), strict=True)):
        response = batch.response_ids[row, :r]
        ids = torch.cat([batch.prompt_ids[row, :p], response])[None]
        with torch.no_grad():
            log_softmax = (theirs(ids).logits[0, p - 1 : -1] / temperature).log_softmax(-1)
        mask = batch.response_mask[row, :r]
        expected = log_softmax.gather(-1, response[:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        torch.testing.assert_close(found.log_probs[row, :r][mask], expected[mask], **TOLERANCE)
        torch.testing.assert_close(found.entropy[row, :r][mask], entropy[mask], **TOLERANCE)
        collision = log_softmax.exp().square().sum(-1)
        torch.testing.assert_close(found.sum_pi_squared[row, :r][mask], collision[mask], **TOLERANCE)
    assert not found.log_probs[~batch.response_mask].any()
    assert not found.entropy[~batch.response_mask].any()
    assert not found.sum_pi_squared[~batch.response_mask].any()
    assert not batch.response_mask[UNSCORED].any()


def test_what_is_not_asked_for_is_not_there() -> None:
    policy, critic = make_policy(), make_critic()
    batch = make_batch(policy, critic)
    outputs = PolicyForward()(policy, batch)
    assert outputs.entropy is outputs.sum_pi_squared is outputs.full_kl is None
    assert ValueForward()(critic, batch).bootstrap_values is None


def test_a_rank_without_a_token_of_the_rows_has_no_value() -> None:
    """Context parallelism leaves ranks without any where all pieces are a token long."""
    critic = make_critic()
    batch = make_batch(make_policy(), critic)
    rows, none = token_rows(batch, packed=True), torch.empty(0, dtype=torch.int64)
    elsewhere = replace(rows, predicts=none, targets=none, slots=none, source=torch.full_like(rows.source, -1))
    elsewhere = replace(elsewhere, ends=torch.full_like(rows.ends, -1))
    states = torch.empty(0, 32, dtype=torch.float64)
    found = ValueForward(with_bootstrap=True).outputs(
        batch, elsewhere, states, partial(values_from_hidden, head=value_head_of(critic))
    )
    assert not found.values.any()
    assert not found.bootstrap_values.any()


@pytest.mark.parametrize("packed", [True, False])
def test_a_truncated_response_has_a_value_after_its_last_token(packed: bool) -> None:
    critic = make_critic()
    batch = make_batch(make_policy(), critic)
    batch.truncated = torch.arange(len(batch)) % 2 == 1  # row 1 has a tool's output in it
    engine = make_engine(critic, MicroBatching(max_rows=2, packed=packed))
    found = engine.infer(batch, ValueForward(packed, with_bootstrap=True))
    torch.testing.assert_close(found.values, engine.infer(batch, ValueForward(packed)).values, rtol=0, atol=1e-12)
    head, theirs = value_head_of(critic), tiny_model("llama", dtype=torch.float64, seed=1).base_model
    for row, (p, r) in enumerate(zip(batch.prompt_length.tolist(), batch.response_length.tolist(), strict=True)):
        ids = torch.cat([batch.prompt_ids[row, :p], batch.response_ids[row, :r]])[None]
        with torch.no_grad():
            expected = head(theirs(ids).last_hidden_state[0, -1])
        if not batch.truncated[row]:
            expected = torch.zeros_like(expected)
        torch.testing.assert_close(found.bootstrap_values[row : row + 1], expected, **TOLERANCE)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_kl_over_the_vocabulary_is_that_of_transformers_logits(packed: bool, temperature: float) -> None:
    policy, reference = make_policy(), make_policy(seed=1)
    batch = make_batch(policy, make_critic())
    with torch.no_grad():
        found = PolicyForward(temperature, packed, with_full_kl=True)(policy, batch, ReferenceModel(reference)).full_kl
    theirs = [tiny_model("llama", dtype=torch.float64, seed=seed) for seed in (0, 1)]
    for row, (p, r) in enumerate(zip(batch.prompt_length.tolist(), batch.response_length.tolist(), strict=True)):
        ids = torch.cat([batch.prompt_ids[row, :p], batch.response_ids[row, :r]])[None]
        with torch.no_grad():
            log_p, log_q = ((model(ids).logits[0, p - 1 : -1] / temperature).log_softmax(-1) for model in theirs)
        mask = batch.response_mask[row, :r]
        torch.testing.assert_close(
            found[row, :r][mask], (log_p.exp() * (log_p - log_q)).sum(-1)[mask], rtol=1e-5, atol=1e-5
        )
    assert found[batch.response_mask].min() > 0.1
    assert not found[~batch.response_mask].any()


@pytest.mark.parametrize("topk", [None, TopK(8)])
@pytest.mark.parametrize("packed", [True, False])
def test_the_kl_over_the_vocabulary_is_to_the_teacher_of_the_row(packed: bool, topk: TopK | None) -> None:
    """The KL is that to each teacher alone, and so is the gradient; a single teacher of all rows is the other one."""
    policy, teachers = make_policy(), (make_policy(seed=1), make_policy(seed=2))
    batch = make_batch(policy, make_critic())
    forward = PolicyForward(packed=packed, with_full_kl=True, forward_kl=topk)
    weights = [p for p in policy.parameters() if p.requires_grad]
    alone = [forward(policy, batch, ReferenceModel(teacher)).full_kl for teacher in teachers]
    of_prompt = batch.uid.unique(return_inverse=True)[1] % 2
    for teacher in (of_prompt, 1 - of_prompt, torch.ones_like(of_prompt)):
        batch.teacher = teacher
        found = forward(policy, batch, ReferenceModel(teachers[0], other_models=(teachers[1],))).full_kl
        expected = torch.where(teacher[:, None] == 0, *alone)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(kl.sum(), weights, retain_graph=True) for kl in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_with_lora_the_reference_is_the_policy_without_its_adapter() -> None:
    """It is the adapter alone that gets a gradient, also where layers are recomputed after the adapter was off."""
    policy, base = make_policy(), make_policy()
    torch.manual_seed(0)
    add_lora(policy, LoraOptions(rank=4))
    batch = make_batch(base, make_critic())
    reference = ReferenceModel(policy, inference_context=adapter_off)
    assert PolicyForward(with_full_kl=True)(policy, batch, reference).full_kl.abs().max() < 1e-12
    adapter = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    for parameter in adapter.values():
        torch.nn.init.normal_(parameter, std=0.2)
    enable_gradient_checkpointing(policy.train())
    found, expected = (
        PolicyForward(with_full_kl=True)(policy, batch, kept).full_kl for kept in (reference, ReferenceModel(base))
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(kl.sum(), list(adapter.values())) for kl in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
def test_a_value_is_read_before_its_token(packed: bool) -> None:
    """It cannot depend on the token itself, and does depend on the one before."""
    critic = make_critic()
    batch = make_batch(make_policy(), critic)
    forward = ValueForward(packed)
    with torch.no_grad():
        before = forward(critic, batch).values
        batch.response_ids[0, 2] = 77
        after = forward(critic, batch).values
    assert torch.equal(after[0, :3], before[0, :3])
    assert after[0, 3] != before[0, 3]
    assert not before[~batch.response_mask].any()


def test_the_first_value_is_the_heads_at_the_last_prompt_token() -> None:
    critic = make_critic()
    batch = make_batch(make_policy(), critic)
    with torch.no_grad():
        values = ValueForward()(critic, batch).values
        head = value_head_of(critic)
        theirs = tiny_model("llama", dtype=torch.float64, seed=1).base_model
        for row, p in enumerate(batch.prompt_length.tolist()):
            if row != UNSCORED:
                expected = head(theirs(batch.prompt_ids[row : row + 1, :p]).last_hidden_state[0, -1])
                torch.testing.assert_close(values[row, :1], expected, **TOLERANCE)
