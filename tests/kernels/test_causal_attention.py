"""Attention with its own gradient, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from tether.kernels.causal_attention import AttentionSpec
from tether.kernels.dispatch import kernels_for


@pytest.mark.parametrize("width", [1, 37, 300])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=str
)
def test_values_and_gradients(dtype: torch.dtype, tolerance: float, width: int) -> None:
    torch.manual_seed(0)
    shapes = [(2, heads, width, 8) for heads in (6, 2, 2)]
    found = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in found]
    grad = torch.randn(shapes[0], dtype=torch.float64).to(dtype)
    out = kernels_for(*found).causal_attention(*found, AttentionSpec(0, 0.4))
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, scale=0.4, enable_gqa=True)
    pairs = zip(
        (out, *torch.autograd.grad(out, found, grad)),
        (expected, *torch.autograd.grad(expected, exact, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        assert (ours - theirs).norm() <= tolerance * theirs.norm().clamp(min=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (1, 1)])
def test_a_gradient_of_any_strides(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """That of a sum is one number, expanded."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 5, 8).to(dtype).requires_grad_() for n in (heads[0], heads[1], heads[1]))
    out = kernels_for(query).causal_attention(query, key, value, AttentionSpec(0, 0.4))
    expanded = torch.autograd.grad(out.sum(), (query, key, value), retain_graph=True)
    dense = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    assert all(a.equal(b) for a, b in zip(expanded, dense, strict=True))
