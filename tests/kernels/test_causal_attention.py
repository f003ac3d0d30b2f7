"""Attention with its own gradient, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from tether.kernels.cpu.causal_attention import causal_attention


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
    out = causal_attention(*found, 0.4)
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, scale=0.4, enable_gqa=True)
    pairs = zip(
        (out, *torch.autograd.grad(out, found, grad)),
        (expected, *torch.autograd.grad(expected, exact, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        assert (ours - theirs).norm() <= tolerance * theirs.norm().clamp(min=1.0)
