"""Gradient checkpointing changes no gradient; what it keeps has pages of its own, and gives them back."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPTBigCodeConfig, PreTrainedModel

from tests.tiny import TINY_CONFIGS, VOCAB_SIZE, tiny_model
from tether.text.models import layers
from tether.text.models.layers import LARGE, Packed, enable_gradient_checkpointing, in_own_pages, use_tether_attention
from tether.text.models.output import hidden_states
from tether.text.models.packing_check import disable_dropout


def gradients(model: PreTrainedModel, packed: tuple[Tensor, Tensor, Packed]) -> dict[str, Tensor]:
    hidden = hidden_states(model, *packed)
    (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("name", "large"), [*((name, LARGE) for name in TINY_CONFIGS), ("llama", 0), ("qwen3_moe", 0)])
def test_no_gradient_changes(
    monkeypatch: pytest.MonkeyPatch, name: str, packed: tuple[Tensor, Tensor, Packed], large: int
) -> None:
    monkeypatch.setattr(layers, "LARGE", large)
    model = tiny_model(name, dtype=torch.float64).train()
    use_tether_attention(model)
    plain = gradients(model, packed)
    enable_gradient_checkpointing(model)
    checkpointed = gradients(model, packed)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[key], checkpointed[key]) for key in plain)


@pytest.mark.parametrize("config", [GPT2Config, GPTBigCodeConfig])
def test_layers_that_are_called_with_none_by_position(config: type, packed: tuple[Tensor, Tensor, Packed]) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(config(**sizes)).double().train()
    disable_dropout(model)
    use_tether_attention(model)
    plain = gradients(model, packed)
    enable_gradient_checkpointing(model)
    checkpointed = gradients(model, packed)
    assert all(torch.equal(plain[key], checkpointed[key]) for key in plain)


def test_each_layer_keeps_its_input_in_such_pages(
    monkeypatch: pytest.MonkeyPatch, packed: tuple[Tensor, Tensor, Packed]
) -> None:
    moved = []
    monkeypatch.setattr(layers, "in_own_pages", lambda x: moved.append(x) or x)
    model = tiny_model("llama").train()
    use_tether_attention(model)
    enable_gradient_checkpointing(model)
    gradients(model, packed)
    assert len(moved) == len(model.model.layers)
    assert all(x.shape == (*packed[0].shape, model.config.hidden_size) for x in moved)


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is moved")
def test_large_tensors_have_pages_of_their_own_and_give_them_back() -> None:
    x = torch.randn(3, LARGE // 4, dtype=torch.bfloat16).T.requires_grad_()
    kept = in_own_pages(x)
    assert kept is not x
    assert torch.equal(kept, x)
    (kept * 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    address = kept.data_ptr()
    assert is_mapped(address)
    del kept
    assert not is_mapped(address)


def test_small_tensors_stay_where_they_are() -> None:
    x = torch.zeros(LARGE - 1, dtype=torch.uint8)
    assert in_own_pages(x) is x
