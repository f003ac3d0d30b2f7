"""Weights on their way to a server have the names and values of a checkpoint, adapters and experts included."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import TINY_CONFIGS, tiny_model
from tether.text.models.lora import LoraOptions, add_lora, merged_state_dict, save_adapter
from tether.text.servers.build import PolicyInfo
from tether.text.servers.checkpoint_names import checkpoint_weights, without_adapters


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_names_and_values_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    tied = PolicyInfo.of(model).tied_names
    state = {key: value for key, value in model.state_dict().items() if key not in tied}
    found, saved = dict(checkpoint_weights(state.items(), 1.0)), load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_adapters_are_added_into_their_layers(name: str) -> None:
    """Qwen2 has biases beside the adapted weights; experts have no adapters."""
    model = tiny_model(name, dtype=torch.float64)
    plain = dict(checkpoint_weights(model.state_dict().items(), 4.0))
    add_lora(model, LoraOptions(rank=4, alpha=16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "lora_B" in key:
                value.copy_(torch.randn(value.shape, generator=generator))
    found = dict(checkpoint_weights(model.state_dict().items(), 16 / 4))
    expected = dict(checkpoint_weights(merged_state_dict(model).items(), 1.0))
    assert found.keys() == expected.keys() == plain.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12)
    moved = {key for key in plain if not torch.equal(plain[key], found[key])}
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    assert not any("experts.0" in key or key.endswith("bias") for key in moved)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_adapters_are_kept_apart_under_the_names_of_their_file(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    plain = {key: value.clone() for key, value in checkpoint_weights(model.state_dict().items(), 1.0)}
    add_lora(model, LoraOptions(rank=4))
    adapters: dict[str, torch.Tensor] = {}
    layers = dict(without_adapters(model.state_dict().items(), adapters))
    assert layers.keys() == plain.keys()
    assert all(torch.equal(layers[key], plain[key]) for key in plain)
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert adapters.keys() == saved.keys()
    assert all(torch.equal(adapters[key], saved[key]) for key in saved)
