"""Rotations are transformers' own, forward and back, and our attention modules stand where transformers' stood."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.tiny import tiny_model
from tether.kernels import dispatch
from tether.text.models.layers import Packed, RotaryAttention, replace_attentions, rotated
from tether.text.models.output import hidden_states


@pytest.mark.parametrize(
    ("dtype", "with_kernels", "tolerance"),
    [(torch.float64, True, 1e-12), (torch.bfloat16, True, 1e-2), (torch.bfloat16, False, 1e-2)],
)
def test_the_same_as_transformers_and_back(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_kernels: bool, tolerance: float
) -> None:
    if not with_kernels:
        monkeypatch.setattr(dispatch, "backend", lambda *_: dispatch.REFERENCE)
    torch.manual_seed(0)
    heads = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    angle = torch.randn(1, 5, 4)  # the positions of both rows are the same
    cosine, sine = (torch.cat([half, half], dim=-1).to(dtype) for half in (angle.cos(), angle.sin()))
    exact = heads.detach().double().requires_grad_()
    expected, _ = apply_rotary_pos_emb(exact, exact, cosine.double(), sine.double(), unsqueeze_dim=2)
    found, grad = rotated(heads, cosine, sine), torch.randn(2, 5, 3, 8).to(dtype)
    (back,) = torch.autograd.grad(found, heads, grad)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    for ours, theirs in ((found, expected), (back, wanted)):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_with_a_layout_and_without_one(name: str) -> None:
    """Without one the module computes what transformers' would, so that the two can be compared."""
    model = tiny_model(name, dtype=torch.float64).eval()
    before, ids = dict(model.named_parameters()), torch.randint(4, 260, (1, 6))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model.base_model(ids, use_cache=False).last_hidden_state[0]
        replace_attentions(model)
        apart = model.base_model(ids, use_cache=False).last_hidden_state[0]
        packed = hidden_states(model, ids, torch.arange(6)[None], Packed((6,)))
    assert all(type(layer.self_attn) is RotaryAttention for layer in model.base_model.layers)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert apart.equal(expected)
    torch.testing.assert_close(packed, expected, rtol=1e-6, atol=1e-6)
