"""Our norms give what transformers' modules give, and the gradient is that of the formula."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.tiny import tiny_model
from tether.kernels import dispatch, reference
from tether.text.models.layers import RMSNorm, replace_norms

WIDTH = 6


def both(theirs: nn.Module, offset: float, dtype: torch.dtype) -> tuple[nn.Module, RMSNorm]:
    theirs = theirs.to(dtype)
    with torch.no_grad():
        theirs.weight.normal_(generator=torch.Generator().manual_seed(1))
    return theirs, RMSNorm(theirs.weight, 1e-2, offset)


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_as_transformers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_kernels: bool) -> None:
    if not with_kernels:
        monkeypatch.setattr(dispatch, "backend", lambda *_: dispatch.REFERENCE)
    x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)
    for module, offset in ((LlamaRMSNorm(WIDTH, eps=1e-2), 0.0), (Gemma2RMSNorm(WIDTH, eps=1e-2), 1.0)):
        theirs, ours = both(module, offset, dtype)
        found, expected = ours(x.requires_grad_()), theirs(x)
        tolerance = {"rtol": 1e-6 if dtype == torch.float32 else 1e-2, "atol": 1e-6 if dtype == torch.float32 else 1e-2}
        torch.testing.assert_close(found, expected, **tolerance)
        with torch.no_grad():
            assert ours(x).equal(found)
        grad = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
        wanted = torch.autograd.grad(expected, (x, theirs.weight), grad)
        for mine, other in zip(torch.autograd.grad(found, (x, ours.weight), grad), wanted, strict=True):
            error = (mine.double() - other.double()).norm() / other.double().norm()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_by_finite_differences(offset: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(nn.Parameter(torch.randn(WIDTH, dtype=torch.float64)), 1e-2, offset)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


@pytest.mark.parametrize("cached", [1, 4 * WIDTH, 1 << 17])
def test_it_does_not_matter_how_many_rows_are_computed_at_a_time(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(nn.Parameter(torch.randn(WIDTH, dtype=torch.float64)), 1e-2, 0.0)
    grad = torch.randn(5, 2, WIDTH, dtype=torch.float64)
    monkeypatch.setattr(reference, "_CACHED", cached)
    out = norm(x)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, (x, norm.weight), grad)
    torch.testing.assert_close(torch.autograd.grad(out, (x, norm.weight), grad), wanted)


def test_replacing_keeps_parameters_names_and_modes() -> None:
    model = tiny_model("gemma3").train()
    model.model.norm.eval()
    before = dict(model.named_parameters())
    replace_norms(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is before[name] for name in before)
    assert type(model.model.layers[0].self_attn.q_norm) is RMSNorm
    assert not model.model.norm.training
    assert model.model.layers[0].input_layernorm.training
