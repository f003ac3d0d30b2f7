"""Compiled kernels against the formulas in float64, and what they do with NaN, infinity and another thread count."""

import math
import subprocess
import sys

import numba
import pytest
import torch
from torch import Tensor

from tether.kernels.dispatch import REFERENCE, kernels_for

BF16 = torch.bfloat16
if kernels_for(torch.zeros(1, dtype=BF16)) is REFERENCE:
    pytest.skip("no GNU OpenMP here", allow_module_level=True)

from tether.kernels.cpu import decode_attention, elementwise, linear_plain, openmp_loop  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def close(found: Tensor, expected: Tensor, ulps: float = 1.0) -> None:
    """Within so many roundings to bfloat16 (8 bits)."""
    typical = float(expected.abs().mean())
    torch.testing.assert_close(found.double(), expected, rtol=ulps * 2**-8, atol=ulps * 2**-8 * typical)


def normed(x: Tensor, weight: Tensor, out: Tensor, offset: float = 0.0) -> Tensor:
    """Of x [N, H, E] into `out`; the scale [N, H]."""
    scale = torch.empty(x.shape[:2])
    elementwise.rms_norm(x=x, weight=weight, out=out, scale=scale, offset=offset, eps=1e-2)
    return scale


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 40), (130, 7)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_and_its_backward_pass(rows: int, width: int, offset: float) -> None:
    x, weight, grad = drawn(rows, width), drawn(width, seed=1), drawn(rows, width, seed=2)
    out, grad_x, parts = torch.empty_like(x), torch.empty_like(x), torch.zeros(3, width)
    scale = normed(x[:, None], weight, out[:, None], offset).squeeze(1)
    both = {"x": x, "weight": weight, "scale": scale, "offset": offset}
    elementwise.rms_norm_backward(**both, grad=grad, grad_x=grad_x, grad_weight=parts)
    exact, w = x.double().requires_grad_(), weight.double().requires_grad_()
    factor = (exact.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    expected = exact * factor * (w + offset)
    close(out, expected.detach(), 2)
    torch.testing.assert_close(scale.double(), factor.detach().squeeze(-1), rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(expected, (exact, w), grad.double())
    close(grad_x, wanted[0])
    torch.testing.assert_close(parts.sum(0).double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_norm_of_some_heads_of_each_row() -> None:
    """The next row's do not follow at once."""
    x, weight = drawn(6, 9, 8)[:, 2:5], drawn(8, seed=1)
    out = torch.empty(6, 3, 8, dtype=BF16)
    scale = normed(x, weight, out)
    exact = x.double()
    factor = (exact.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    close(out, exact * factor * weight.double(), 2)
    torch.testing.assert_close(scale.double(), factor.squeeze(-1), rtol=1e-6, atol=0)


def test_silu_mul_and_its_backward_pass() -> None:
    gate, up, grad = drawn(1001, scale=6), drawn(1001, seed=1), drawn(1001, seed=2)
    gate[:4] = torch.tensor([200.0, -200.0, 88.0, -88.0])  # where e^x leaves float32
    out, grad_gate, grad_up = (torch.empty_like(gate) for _ in range(3))
    elementwise.silu_mul(gate=gate, up=up, out=out)
    elementwise.silu_mul_backward(gate=gate, up=up, grad=grad, grad_gate=grad_gate, grad_up=grad_up)
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    expected = torch.nn.functional.silu(g) * u
    close(out, expected.detach())
    wanted = torch.autograd.grad(expected, (g, u), grad.double())
    close(grad_gate, wanted[0])
    close(grad_up, wanted[1])


def test_rotation_and_back() -> None:
    """Of some heads of each row: the next row's do not follow at once."""
    x, angle = drawn(6, 9, 8)[:, :5], torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    cosine, sine = (torch.cat([half, half], -1).to(BF16) for half in (angle.cos(), angle.sin()))
    turned, back = torch.empty(6, 5, 8, dtype=BF16), torch.empty(6, 5, 8, dtype=BF16)
    elementwise.rotate(x=x, cosine=cosine, sine=sine, out=turned, sign=1.0)
    elementwise.rotate(x=turned, cosine=cosine, sine=sine, out=back, sign=-1.0)
    first, second = x.double().chunk(2, -1)
    c, s = cosine.double()[:, None, :4], sine.double()[:, None, :4]
    close(turned, torch.cat([first * c - second * s, second * c + first * s], -1))
    close(back, x.double(), 3)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("outputs", [1, 3, 50])
def test_products(rows: int, outputs: int) -> None:
    x, weight = drawn(rows, 37), drawn(outputs, 37, seed=1)
    bias, other = drawn(outputs, seed=2), drawn(rows, 60, seed=3)
    product, other = x.double() @ weight.double().T, other[:, 7 : 7 + outputs]
    cases = {
        linear_plain.PLAIN: (None, product),
        linear_plain.SILU: (bias, torch.nn.functional.silu(product + bias.double())),
        linear_plain.TIMES: (None, product * other.double()),
        linear_plain.PLUS: (bias, product + bias.double() + other.double()),
    }
    for epilogue, (summand, expected) in cases.items():
        out = torch.full((rows, 60), 9.0, dtype=BF16)
        tensors = {"x": x, "weight": weight, "bias": summand, "out": out[:, 7 : 7 + outputs]}
        beside = other if epilogue >= linear_plain.TIMES else None
        linear_plain.linear_few_rows(**tensors, other=beside, epilogue=epilogue)
        close(out[:, 7 : 7 + outputs], expected)
        assert out[:, :7].eq(9).all()
        assert out[:, 7 + outputs :].eq(9).all()


def attended(
    heads: Tensor, position: Tensor, keys: Tensor, values: Tensor, softcap: float = 0.0, window: int = 0
) -> Tensor:
    """`heads` [R, 4 + 2 + 2, 8]: four query heads, two of keys, two of values, as a layer's product lays them out."""
    query, key, value = heads.split([4, 2, 2], dim=1)
    out = heads.new_empty(len(heads), 4, 8)
    new, cache = {"query": query, "key": key, "value": value}, {"keys": keys, "values": values}
    decode_attention.attend(**new, **cache, position=position, out=out, scale=0.4, softcap=softcap, window=window)
    return out


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_attention_of_a_new_token(softcap: float, window: int) -> None:
    position = torch.tensor([0, 3, 11, 4, 30])
    heads, keys, values = drawn(5, 8, 8), drawn(5, 2, 31, 8, seed=1), drawn(5, 2, 31, 8, seed=2)
    seen = torch.arange(31) <= position[:, None]
    if window:
        seen &= torch.arange(31) > position[:, None] - window
    unwritten = (torch.arange(31) >= position[:, None])[:, None].expand(5, 2, 31)
    keys[unwritten] = values[unwritten] = math.nan
    out = attended(heads, position, keys, values, softcap, window)
    rows = torch.arange(5)
    assert keys[rows, :, position].equal(heads[:, 4:6])
    assert values[rows, :, position].equal(heads[:, 6:])
    query = heads[:, :4].double().unflatten(1, (2, 2))
    scores = torch.einsum("rkgd,rkld->rkgl", query, keys.double().nan_to_num()) * 0.4
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    close(out, (weights @ values.double().nan_to_num()).flatten(1, 2), 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_damage_is_not_hidden(bad: float) -> None:
    """A key, an input or a gate that is not finite is seen in what comes out."""
    heads, keys, values = drawn(1, 8, 8), drawn(1, 2, 9, 8, seed=1), drawn(1, 2, 9, 8, seed=2)
    values[0, 0, 2, 0] = bad
    assert not attended(heads, torch.tensor([5]), keys, values)[0, :2, 0].isfinite().any()
    x, out = drawn(2, 5), torch.empty(2, 5, dtype=BF16)
    x[1, 3] = bad
    normed(x[:, None], drawn(5), out[:, None])
    assert out[0].isfinite().all()
    assert out[1].isnan().any()
    elementwise.silu_mul(gate=drawn(10), up=x.flatten(), out=out.flatten())
    assert not out[1, 3].isfinite()
    out = out[:, :1]
    nothing = {"bias": None, "other": None, "epilogue": linear_plain.PLAIN}
    linear_plain.linear_few_rows(x=x, weight=drawn(1, 5), out=out, **nothing)
    assert not out[1].isfinite()


def test_a_key_that_is_not_a_number_spoils_its_row() -> None:
    heads, keys, values = drawn(2, 8, 8), drawn(2, 2, 9, 8, seed=1), drawn(2, 2, 9, 8, seed=2)
    keys[1, 0, 3, 0] = math.nan
    out = attended(heads, torch.tensor([5, 5]), keys, values)
    assert out[1, :2].isnan().all()
    assert out[0].isfinite().all()


def test_the_number_of_threads_changes_no_bit() -> None:
    heads, position = drawn(7, 8, 8), torch.tensor([9, 1, 30, 4, 4, 17, 0])
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        x, out, parts = drawn(50, 12), torch.empty(50, 12, dtype=BF16), torch.zeros(4, 12)
        both = {"x": x, "weight": drawn(12), "scale": normed(x[:, None], drawn(12), out[:, None])[:, 0], "offset": 0.0}
        grads = {"grad": drawn(50, 12, seed=3), "grad_x": torch.empty_like(x), "grad_weight": parts}
        elementwise.rms_norm_backward(**both, **grads)
        keys, values = drawn(7, 2, 31, 8, seed=1), drawn(7, 2, 31, 8, seed=2)
        results.append((out, parts, attended(heads, position, keys, values)))
    torch.set_num_threads(before)
    assert all(found.equal(first) for other in results[1:] for found, first in zip(other, results[0], strict=True))


def test_only_for_bfloat16_on_a_cpu() -> None:
    number = torch.zeros(2, dtype=BF16)
    assert kernels_for(number, number).name == "cpu"
    assert kernels_for(number, number.float()) is REFERENCE
    assert kernels_for(number.to("meta")) is REFERENCE


def test_where_nothing_can_be_written_they_are_compiled_again_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile = numba.cfunc

    def without_a_folder(*signature: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile(*signature, **options)

    monkeypatch.setattr(numba, "cfunc", without_a_folder)
    gate, up = drawn(9), drawn(9, seed=1)
    out = torch.empty_like(gate)
    openmp_loop._warn_of_compilation.cache_clear()
    openmp_loop.Kernel(elementwise.silu_mul._body)(gate=gate, up=up, out=out)
    close(out, torch.nn.functional.silu(gate.double()) * up.double())
    assert "Set NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.slow
def test_numba_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, torch; from tether.text.models.layers.fused_modules import RMSNorm; "
        "RMSNorm(torch.nn.Parameter(torch.ones(4)), 1e-5, 0.0)(torch.ones(2, 4)); sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
