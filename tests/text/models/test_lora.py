"""LoRA: off is exactly the base, layouts and log-probs go through, and both forms of saving load back."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.text.learning.batches import gradients, make_batch, make_critic, make_engine, make_policy, weights
from tests.tiny import TINY_CONFIGS, tiny_model
from tether.loop.engine import LossSpec, UpdatePlan
from tether.text.learning.losses import CriticLoss, ValueForward
from tether.text.learning.packing import MicroBatching
from tether.text.models.critic import critic_from
from tether.text.models.layers import enable_gradient_checkpointing, use_tether_attention
from tether.text.models.lora import (
    LoraOptions,
    adapter_off,
    add_lora,
    load_lora,
    names_or_pattern,
    save_adapter,
    save_merged,
)
from tether.text.models.output import hidden_states, lm_head_of, token_log_probs, value_head_of
from tether.text.models.packing_check import prepare_for_packing


def trained_lora(model, options=LoraOptions(rank=4)):
    """Adapters as training leaves them: B is no longer zero."""
    torch.manual_seed(5)
    add_lora(model, options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_off_is_exactly_the_base(name, packed):
    model = tiny_model(name)
    use_tether_attention(model)
    with torch.no_grad():
        base = hidden_states(model, *packed)
        add_lora(model, LoraOptions(rank=4))
        assert torch.equal(hidden_states(model, *packed), base)  # adapters start as no change
        trained = trained_lora(tiny_model(name))
        use_tether_attention(trained)
        on = hidden_states(trained, *packed)
        with adapter_off(trained):
            assert torch.equal(hidden_states(trained, *packed), base)
        assert torch.equal(hidden_states(trained, *packed), on)
    assert (on - base).abs().max() > 0.01


def test_only_adapters_get_gradients_also_with_checkpointing(packed):
    model = trained_lora(tiny_model("llama"))
    prepare_for_packing(model)
    model.train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_gradient_checkpointing(model)
        hidden = hidden_states(model, *packed)
        token_log_probs(hidden, lm_head_of(model), packed[0][0]).log_probs.sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert found[0].keys() == trainable(model)
    assert all("lora_" in name for name in found[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_which_layers():
    model = tiny_model("llama")
    add_lora(model, LoraOptions(rank=2, target_modules=("q_proj", "v_proj"), exclude_modules=("v_proj",)))
    assert {name.split(".")[4] for name in trainable(model)} == {"q_proj"}
    matched = tiny_model("llama")
    pattern, excluded = names_or_pattern((r".*\.[01]\.self_attn\.[qv]_proj",)), names_or_pattern((r".*0.*\.q.*",))
    add_lora(matched, LoraOptions(rank=2, target_modules=pattern, exclude_modules=excluded))
    assert {".".join(name.split(".")[2:5]) for name in trainable(matched)} == {
        *("0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj")
    }
    everything = tiny_model("llama")
    add_lora(everything, LoraOptions(rank=2))
    names = {name.split(".")[4] for name in trainable(everything)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_bad_options():
    with pytest.raises(ValueError, match="lora_rank=0: must be at least 1"):
        add_lora(tiny_model("llama"), LoraOptions(rank=0))


def test_what_matches_no_layer_is_refused():
    for named, words in (
        (("query",), "'query' is no linear layer of LlamaForCausalLM. It has: down_proj, .*q_proj"),
        (("q_proj", ".*v_proj"), "'.*v_proj' is no linear layer"),
        ((".*visual.*",), "the pattern '.*visual.*' matches the full name of no .* model.layers.0.self_attn.q_proj"),
        (("q_proj(",), r"'q_proj\(' is no regular expression"),
    ):
        for key in ("target_modules", "exclude_modules"):
            options = LoraOptions(2, **{key: names_or_pattern(named)})
            with pytest.raises(ValueError, match=f"^{key}: {words}"):
                add_lora(tiny_model("llama"), options)
    assert names_or_pattern(("all-linear",)) == "all-linear"
    assert [names_or_pattern(named) for named in (("q_proj",), ())] == [("q_proj",), ()]


def test_experts_and_routers_stay_frozen_whatever_peft_takes_their_names_for(tmp_path, packed):
    """peft 0.19 and later read ``all-linear`` as fused experts and routers, too, which could not be merged."""
    model = trained_lora(tiny_model("qwen3_moe"))
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trainable(model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    save_adapter(model, tmp_path)
    again = tiny_model("qwen3_moe")
    load_lora(again, tmp_path)
    with torch.no_grad():
        assert torch.equal(again(packed[0]).logits, model(packed[0]).logits)


def test_what_could_not_be_merged_is_refused():
    for name, modules, words in (
        ("deepseek_v3", ("gate_proj", "up_proj"), "on model.layers.1.mlp.experts of DeepseekV3ForCausalLM"),
        ("deepseek_v3", ("gate_proj",), "Cannot convert PEFT target"),
        ("llama", r".*(embed_tokens|q_proj)", "on model.embed_tokens .* no linear layer.*Name .*: q_proj"),
    ):
        with pytest.raises(ValueError, match=f"target_modules=.*{words}"):
            add_lora(tiny_model(name), LoraOptions(rank=2, target_modules=modules))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_merged_directory_loads_in_transformers_and_leaves_the_model_alone(name, tmp_path, packed):
    model = trained_lora(tiny_model(name, dtype=torch.float64))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    save_merged(model, tmp_path)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        assert torch.allclose(merged(packed[0]).logits, model(packed[0]).logits, rtol=1e-9, atol=1e-9)
    assert merged.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_adapter_directory_loads_in_peft_and_here(tmp_path, packed):
    from peft import PeftModel

    model = trained_lora(tiny_model("qwen2"))
    save_adapter(model, tmp_path)
    with torch.no_grad():
        expected = model(packed[0]).logits
        assert torch.equal(PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path).eval()(packed[0]).logits, expected)
        again = tiny_model("qwen2")
        load_lora(again, tmp_path)
        assert torch.equal(again(packed[0]).logits, expected)
    assert trainable(again) == trainable(model)


def of_peft(folder, name="llama", **options):
    """An adapter as peft trains and saves one."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    torch.manual_seed(5)
    theirs = get_peft_model(tiny_model(name), LoraConfig(**settings | options))
    for parameter_name, parameter in theirs.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(folder)
    return theirs.eval()


def test_an_adapter_of_peft_computes_what_peft_does(tmp_path, packed):
    """Without its dropout, also in training; on a critic, too."""
    theirs = of_peft(tmp_path, lora_dropout=0.5, layers_to_transform=[1], init_lora_weights="gaussian")
    model, critic = tiny_model("llama"), critic_from(tiny_model("llama"))
    load_lora(model, tmp_path)
    load_lora(critic, tmp_path)
    assert len(trainable(model)) == 4
    with torch.no_grad():
        expected = theirs(packed[0]).logits
        assert torch.equal(model(packed[0]).logits, expected)
        assert torch.equal(model.train()(packed[0]).logits, expected)
        assert torch.equal(critic.base_model(packed[0])[0], theirs.base_model.model.model(packed[0])[0])
    assert trainable(critic) == {*trainable(model), "score.weight", "score.bias"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"down_proj": 5}}, "rank_pattern={'down_proj': 5}"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "lora_only"}, "bias=lora_only"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
    ],
)
def test_what_is_not_plain_lora_is_not_started_from(options, words, tmp_path):
    of_peft(tmp_path, **options)
    with pytest.raises(ValueError, match=f"^{tmp_path}: has {words}.*, and adapters here are plain LoRA. Merge"):
        load_lora(tiny_model("llama"), tmp_path)


def test_an_adapter_names_its_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    for name, expected in (("base", str(tmp_path / "base")), ("owner/name", "owner/name"), ("", None)):
        model = tiny_model("llama")
        model.name_or_path = name
        save_adapter(trained_lora(model), tmp_path / "adapter")
        config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert (config["base_model_name_or_path"] or None) == expected


def test_bad_adapter_directories(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: holds no LoRA adapter"):
        load_lora(tiny_model("llama"), tmp_path)
    save_adapter(trained_lora(tiny_model("llama", num_hidden_layers=3)), tmp_path)
    with pytest.raises(ValueError, match=r"the adapter does not fit LlamaForCausalLM: .* has no counterpart"):
        load_lora(tiny_model("llama"), tmp_path)
    save_adapter(trained_lora(tiny_model("llama", intermediate_size=64)), tmp_path)
    with pytest.raises(ValueError, match=r"does not fit .*proj.* has the shape \[\d+, \d+\], and the model asks for"):
        load_lora(tiny_model("llama"), tmp_path)
    of_peft(tmp_path, "qwen2_moe", target_modules=["shared_expert_gate"])
    with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM \(.*shared_expert_gate.* not found"):
        load_lora(tiny_model("llama"), tmp_path)
    save_adapter(trained_lora(critic_from(tiny_model("llama"))), tmp_path)
    with pytest.raises(ValueError, match="has modules_to_save="):
        load_lora(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_adapter_of_a_critic_has_its_head_and_loads_in_peft_and_here(name, tmp_path, packed):
    from peft import PeftModel

    critic = trained_lora(critic_from(tiny_model(name)).eval())
    torch.nn.init.normal_(value_head_of(critic).weight)
    save_adapter(critic, tmp_path)
    again = critic_from(tiny_model(name)).eval()
    load_lora(again, tmp_path)
    assert trainable(again) == trainable(critic)
    theirs = PeftModel.from_pretrained(critic_from(tiny_model(name)).eval(), tmp_path).eval()
    with torch.no_grad():
        expected = critic(packed[0]).logits
        assert torch.equal(again(packed[0]).logits, expected)
        assert torch.equal(theirs(packed[0]).logits, expected)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == ("TOKEN_CLS" if name == "llama" else "SEQ_CLS")


def test_a_critic_learns_by_its_adapters_and_head_alone():
    """Micro-batches do not change its gradient."""
    batch, loss = make_batch(make_policy(), make_critic()), LossSpec(ValueForward(), CriticLoss(None))
    found = []
    for micro in (MicroBatching(max_rows=1), MicroBatching(max_rows=4), MicroBatching(max_tokens=20)):
        engine = make_engine(trained_lora(make_critic()), micro)
        engine.accumulate_gradients(batch, loss)
        found.append(gradients(engine.model))
        assert found[-1].keys() == trainable(engine.model)
        assert all(torch.allclose(found[-1][name], value, rtol=1e-9, atol=1e-12) for name, value in found[0].items())
    before, plan = weights(engine.model), UpdatePlan(mini_batch_rows=3)
    losses = [engine.update(batch, loss, plan, step).metrics["critic/vf_loss"] for step in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    moved = {name for name, value in weights(engine.model).items() if not torch.equal(value, before[name])}
    assert moved == trainable(engine.model)


def test_a_critics_head_stays_trainable_and_is_merged_with_it(tmp_path, packed):
    critic = critic_from(tiny_model("llama"))
    trained_lora(critic)
    heads = {name for name in trainable(critic) if "lora_" not in name}
    assert heads == {"score.weight", "score.bias"}
    torch.nn.init.normal_(value_head_of(critic).weight)
    save_merged(critic, tmp_path)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(plain(packed[0]).logits, critic.eval()(packed[0]).logits, rtol=1e-4, atol=1e-4)
