"""The CUDA backend hands Liger and flash-attn what they document; and without them it is PyTorch.

No GPU is needed: the packages' functions are fakes with their signatures that compute, in plain PyTorch, what their
documentation says. That the real ones compute the same is not shown here.
"""

import math
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from tests.pairwise import pairwise_parameters
from tether.kernels.causal_attention import AttentionSpec
from tether.kernels.cuda.backend import Cuda
from tether.kernels.dispatch import REFERENCE, backend

ADAPTERS = ("tether.kernels.cuda.liger", "tether.kernels.cuda.flash_attention")


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """flash-attn 2.6: the causal mask is aligned to the bottom right; window_size counts keys to the left and right."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths = (cu_seqlens_q.diff(), cu_seqlens_k.diff())
    assert (int(lengths[0].max()), int(lengths[1].max())) == (max_seqlen_q, max_seqlen_k)
    groups, outputs = q.shape[1] // k.shape[1], []
    for i in range(len(cu_seqlens_q) - 1):
        queries, (keys, values) = (
            q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]],
            (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].repeat_interleave(groups, dim=1) for x in (k, v)),
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
        at = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        far = at - torch.arange(len(keys))
        seen = (far >= 0) & ((window_size[0] < 0) | (far <= window_size[0]))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values))
    return torch.cat(outputs)


def liger_rms_norm(X, W, eps, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True) -> Tensor:
    """ "llama" rounds before the weight, "gemma" after; in place writes over the incoming gradient."""
    assert not in_place
    normed = X.float() * (X.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    if casting_mode == "llama":
        return normed.to(X.dtype) * (W + offset)
    return (normed * (W.float() + offset)).to(X.dtype)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.silu(a) * b


@pytest.fixture(autouse=True)
def no_maker_stays() -> Iterator[None]:
    """A backend that was made with the fakes is no other test's."""
    yield
    backend.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A backend for which both packages seem to be there."""
    functions = {
        "flash_attn": [flash_attn_varlen_func],
        "liger_kernel": [],
        "liger_kernel.transformers": [],
        "liger_kernel.transformers.functional": [liger_rms_norm, liger_swiglu],
    }
    for name, contents in functions.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for function in contents:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ADAPTERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return Cuda()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("prefixes", "window", "softcap"),
    pairwise_parameters((None, (None, 0, 0, None, 3)), (None, 1, 3), (None, 2.0)),
)
def test_packed_attention(
    installed: Cuda,
    monkeypatch: pytest.MonkeyPatch,
    prefixes: tuple[int | None, ...] | None,
    window: int | None,
    softcap: float | None,
) -> None:
    flash = installed._flash
    monkeypatch.setattr(flash, "can_attend", lambda *_: True)  # float64, to compare exactly
    lengths, spec = (5, 2, 4, 3, 1), AttentionSpec(0, 0.4, window, softcap)
    tensors = [drawn(15, heads, 8, seed=heads).requires_grad_() for heads in (4, 2)]
    tensors.append(drawn(15, 2, 8, seed=9).requires_grad_())
    grad = drawn(15, 4, 8, seed=7)
    both = [m.packed_attention(*tensors, lengths, prefixes, spec) for m in (installed, REFERENCE)]
    torch.testing.assert_close(*both)
    for found, expected in zip(*(torch.autograd.grad(out, tensors, grad) for out in both), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_flash_attn_does_not_take_is_left_to_pytorch(installed: Cuda) -> None:
    half = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    assert installed._flash.can_attend(half, half)
    assert not installed._flash.can_attend(half.float(), half.float())
    assert not installed._flash.can_attend(half, half[..., :32])
    assert not installed._flash.can_attend(half.repeat(1, 1, 5), half.repeat(1, 1, 5))
    query, key, value = drawn(3, 2, 8), drawn(3, 1, 8), drawn(3, 1, 8)
    found, expected = (
        m.packed_attention(query, key, value, (3,), None, AttentionSpec(0, 1.0)) for m in (installed, REFERENCE)
    )
    assert found.equal(expected)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_and_gated_mlps(installed: Cuda, offset: float) -> None:
    x, weight = drawn(3, 8, dtype=torch.bfloat16), drawn(8, seed=1, dtype=torch.bfloat16)
    found, expected = (m.rms_norm(x, weight, 1e-5, offset) for m in (installed, REFERENCE))
    torch.testing.assert_close(found, expected)
    down = nn.Linear(8, 2, dtype=torch.bfloat16)
    found, expected = (m.gated_mlp(x, x + 1, down) for m in (installed, REFERENCE))
    assert found.equal(expected)


def test_the_choice_is_named(installed: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    backend.cache_clear()
    with caplog.at_level("INFO"):
        assert backend("cuda", torch.float16) is backend("cuda", torch.float16)
    assert caplog.text.count("kernels for torch.float16 on cuda: norms and gated MLPs: ") == 1
    assert "Liger" in installed.describe()
    assert "flash-attn" in installed.describe()
    assert backend("cuda", torch.bfloat16).name == "cuda"
    assert backend("mps", torch.bfloat16) is REFERENCE
    assert backend("cuda", torch.float64) is REFERENCE  # which Liger does not take


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("tether.kernels.cuda.backend.find_spec", lambda _: None)
    assert Cuda().describe().count("pip install") == 2
    x = drawn(3, 8)
    assert Cuda().rms_norm(x, x[0], 1e-5, 0.0).equal(REFERENCE.rms_norm(x, x[0], 1e-5, 0.0))
