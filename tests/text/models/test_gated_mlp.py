"""Our gated MLPs give what transformers' modules give, in every dtype, and stand where those stood."""

import copy

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_model
from tether.kernels import dispatch
from tether.text.models.layers import GatedMLP, replace_gated_mlps

has_kernels = dispatch.backend("cpu", torch.bfloat16) is not dispatch.REFERENCE


def gradients(mlp: torch.nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = mlp(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *mlp.parameters()], grad)]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_same_as_transformers(name: str) -> None:
    theirs = tiny_model(name, dtype=torch.float64).model.layers[0].mlp
    x = torch.randn(3, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for found, expected in zip(gradients(GatedMLP(theirs), x), gradients(theirs, x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mlp_bias", [True, False])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_bfloat16_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch, with_kernels: bool, mlp_bias: bool) -> None:
    if not with_kernels:
        monkeypatch.setattr(dispatch, "backend", lambda *_: dispatch.REFERENCE)
    exact = tiny_model("llama", dtype=torch.float64, mlp_bias=mlp_bias).model.layers[0].mlp
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact.load_state_dict({key: value.bfloat16() for key, value in exact.state_dict().items()})
    rounded = GatedMLP(copy.deepcopy(exact).bfloat16())
    for found, expected in zip(gradients(rounded, x), gradients(exact, x.double()), strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 0.02


def bfloat16_mlp() -> tuple[GatedMLP, Tensor]:
    mlp = GatedMLP(tiny_model("llama").model.layers[0].mlp.bfloat16())
    return mlp, torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()


@pytest.mark.skipif(not has_kernels, reason="no compiled kernels here")
def test_gate_times_up_is_not_kept() -> None:
    from tether.kernels.cpu import backend  # numba, which may be missing

    mlp, x = bfloat16_mlp()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = mlp(x)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    inner = [tensor for tensor in kept if tensor.shape == gate.shape]
    assert [tensor.equal(expected) for tensor, expected in zip(inner, (gate, up), strict=True)] == [True, True]
    product = backend.silu_mul(gate, up)
    assert out.equal(mlp.down_proj(product))


def test_frozen_layers_get_no_gradient() -> None:
    mlp, x = bfloat16_mlp()
    expected, *_ = torch.autograd.grad(mlp(x).sum(), x)
    mlp.down_proj.requires_grad_(False)
    mlp(x).sum().backward()
    assert x.grad.equal(expected)
    assert mlp.down_proj.weight.grad is None
    assert mlp.gate_proj.weight.grad is not None


@pytest.mark.parametrize("what", ["bias", "another layer"])
def test_other_layers_behind_are_called(what: str) -> None:
    mlp, x = bfloat16_mlp()
    plain = mlp(x)
    if what == "bias":
        mlp.down_proj.bias = torch.nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
        assert mlp(x).equal(torch.nn.functional.linear(gated_of(mlp, x), mlp.down_proj.weight, mlp.down_proj.bias))
    else:
        mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Tanh())
        assert mlp(x).equal(plain.tanh())


def gated_of(mlp: GatedMLP, x: Tensor) -> Tensor:
    """Inputs of the last layer."""
    seen = []
    handle = mlp.down_proj.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    mlp(x)
    handle.remove()
    return seen[0]


def test_replacing_keeps_parameters_names_and_modes() -> None:
    model = tiny_model("qwen2").train()
    model.model.layers[1].mlp.eval()
    before = dict(model.named_parameters())
    replace_gated_mlps(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is before[name] for name in before)
    assert [type(layer.mlp) for layer in model.model.layers] == [GatedMLP, GatedMLP]
    assert [layer.mlp.training for layer in model.model.layers] == [True, False]


def test_another_activation_is_left_alone() -> None:
    model = tiny_model("llama", hidden_act="gelu")
    replace_gated_mlps(model)
    assert not any(isinstance(module, GatedMLP) for module in model.modules())
