"""The critic: starts at zero, learns from there, and goes through transformers' own loading and back."""

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GraniteConfig,
    GraniteForCausalLM,
)

from tests.tiny import TINY_CONFIGS, save_tiny, tiny_model
from tether.text.models.critic import critic_from, load_critic
from tether.text.models.output import hidden_states, value_head_of, values_from_hidden
from tether.text.models.packing_check import prepare_for_packing


def values(critic, packed):
    return values_from_hidden(hidden_states(critic, *packed), value_head_of(critic))


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_round_trip_through_transformers(name, tmp_path, packed):
    save_tiny(tmp_path / "policy", name)
    critic = load_critic(tmp_path / "policy", dtype=torch.float32)
    assert torch.equal(values(critic, packed), torch.zeros(packed[0].shape[1]))

    torch.manual_seed(3)
    torch.nn.init.normal_(value_head_of(critic).weight)
    trained = values(critic, packed)
    critic.save_pretrained(tmp_path / "critic")
    assert torch.equal(values(load_critic(tmp_path / "critic", dtype=torch.float32), packed), trained)

    if name == "gemma3":  # transformers has no token classification model of it: the stated fallback
        assert type(critic).__name__ == "Gemma3TextForSequenceClassification"
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
        assert torch.equal(plain.score.weight, value_head_of(critic).weight)
        return
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", attn_implementation="eager").eval()
    ids, _, layout = packed
    with torch.no_grad():
        apart = [plain(part[None]).logits[0, :, 0] for part in ids[0].split(list(layout.lengths))]
    assert torch.allclose(torch.cat(apart), trained, rtol=1e-4, atol=1e-4)


def test_the_backbone_is_moved_not_copied():
    model = tiny_model("llama")
    backbone = model.base_model
    critic = critic_from(model)
    assert critic.base_model is backbone
    # By which transformers below 5.23 chooses the attention of the layers.
    assert critic.config is backbone.layers[0].self_attn.config


def test_a_zero_head_learns(packed):
    critic = critic_from(tiny_model("llama"))
    prepare_for_packing(critic)
    head, backbone = value_head_of(critic), critic.base_model.layers[0].mlp.up_proj
    target = torch.linspace(-1, 1, packed[0].shape[1])
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        loss = (values(critic, packed) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        assert head.weight.grad.abs().max() > 0
        assert (backbone.weight.grad.abs().max() > 0) == (step > 0)  # it waits one step
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.01 * losses[0]


def test_values_are_not_rounded_under_autocast(packed):
    critic = critic_from(tiny_model("llama"))
    prepare_for_packing(critic)
    head = value_head_of(critic)
    torch.nn.init.constant_(head.bias, 1.001)  # 1.0 in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = values(critic, packed)
    assert found.dtype == torch.float32
    assert torch.allclose(found, torch.full_like(found, 1.001), atol=1e-6)


def test_a_reward_model_with_one_label_keeps_its_head(tmp_path):
    reward_model = AutoModelForSequenceClassification.from_config(TINY_CONFIGS["qwen2"](num_labels=1))
    reward_model.save_pretrained(tmp_path)
    critic = load_critic(tmp_path, dtype=torch.float32)
    assert torch.equal(value_head_of(critic).weight, reward_model.score.weight)


def test_a_head_with_more_labels_is_refused(tmp_path):
    AutoModelForTokenClassification.from_config(TINY_CONFIGS["qwen2"](num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: its head has 3 labels"):
        load_critic(tmp_path, dtype=torch.float32)


def test_a_family_without_classification_models_is_refused():
    config = GraniteConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match=r"GraniteConfig: transformers has no classification .*critic.model.path; "):
        critic_from(GraniteForCausalLM(config))
