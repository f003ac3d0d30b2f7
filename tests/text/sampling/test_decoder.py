"""The lean forward against transformers' own, family by family, and when it is not used."""

import copy
import itertools

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.tiny import VOCAB_SIZE, tiny_model
from tether.kernels.dispatch import kernels_for
from tether.text.models.layers import Packed, use_tether_attention
from tether.text.sampling.decoder import Decoder, Product, decoder_for
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

LAYOUT = Packed((7, 12, 1))
KNOWN = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")


def ready(name: str, dtype: torch.dtype = torch.float64, **overrides: object) -> PreTrainedModel:
    model = tiny_model(name, dtype=dtype, **overrides)
    use_tether_attention(model)
    return model


@torch.no_grad()
def error(model: PreTrainedModel, decoder: Decoder) -> float:
    """Largest relative difference of a token's logits from transformers' forward."""
    ids = torch.randint(4, VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(5))
    positions = LAYOUT.position_ids()
    found = decoder(ids, positions, LAYOUT, None)
    options = {"use_cache": False, "attention_layout": LAYOUT}
    expected = model(input_ids=ids, position_ids=positions, **options).logits[0]
    some = torch.tensor([6, 19])
    torch.testing.assert_close(decoder(ids, positions, LAYOUT, some), found[some], rtol=2e-2, atol=1e-6)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("name", KNOWN)
def test_the_same_function(name: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        model = ready(name, dtype)
        decoder = decoder_for(model)
        assert decoder is not None
        assert error(model, decoder) < tolerance


def test_biases_everywhere() -> None:
    model = ready("llama", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    decoder = decoder_for(model)
    assert decoder is not None
    assert error(model, decoder) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_changed_weights_are_taken_over(dtype: torch.dtype) -> None:
    model = ready("gemma3", dtype)
    decoder = decoder_for(model)
    assert decoder is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    decoder.refresh()
    assert error(model, decoder) < (1e-12 if dtype == torch.float64 else 5e-2)


def test_generate_takes_changed_weights_over_without_being_told() -> None:
    model = ready("llama", torch.bfloat16)
    engine = NativeEngine(model, eos_token_ids=frozenset())
    sampling, key = SamplingParams(6, temperature=0.0), NoiseKey(0, 0)
    engine.generate([[5, 6, 7]], sampling, key)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    fresh = NativeEngine(model, eos_token_ids=frozenset()).generate([[5, 6, 7]], sampling, key)
    assert engine.generate([[5, 6, 7]], sampling, key).response_ids.equal(fresh.response_ids)


def test_what_it_does_not_know_runs_by_transformers(caplog: pytest.LogCaptureFixture) -> None:
    assert decoder_for(ready("qwen2_moe")) is None
    adapted = ready("llama")
    adapted.model.layers[1].mlp.up_proj = nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    assert decoder_for(adapted) is None
    engine = NativeEngine(adapted, eos_token_ids=frozenset())
    assert engine.generate([[5, 6]], SamplingParams(3), NoiseKey(0, 0)).response_ids.shape == (1, 3)
    assert "LlamaForCausalLM is sampled from with transformers' own forward" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiplying", [True, False])
@torch.no_grad()
def test_products_by_parts(dtype: torch.dtype, multiplying: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not multiplying:
        monkeypatch.setattr(kernels_for(torch.zeros(1, dtype=dtype)), "linear_kernels", None, raising=False)
    for bias, widths, rows in itertools.product((False, True), ((16, 48), (64,)), (1, 5, 600)):
        products_equal(dtype, widths, rows, bias=bias)


def products_equal(dtype: torch.dtype, widths: tuple[int, ...], rows: int, *, bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, width, bias=bias).to(dtype) for width in widths]
    x, other = torch.randn(rows, 32).to(dtype), torch.randn(rows, 64).to(dtype)
    product = Product(layers)
    exact = [copy.deepcopy(layer).double()(x.double()) for layer in layers]
    expected = torch.cat(exact, dim=-1)
    for found, wanted in (
        (product(x), expected),
        (product.silu(x), nn.functional.silu(expected)),
        (product.times(x, other), expected * other.double()),
        (product.plus(x, other), expected + other.double()),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


def test_blocks_only_where_they_pay() -> None:
    for dtype in (torch.float32, torch.float16):
        assert kernels_for(torch.zeros(1, dtype=dtype)).pack_linears([nn.Linear(4, 4, dtype=dtype)]) is None
