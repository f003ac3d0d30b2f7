"""Packing changes no output and no gradient; a class that packing does not fit is refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    DiffLlamaConfig,
    DogeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
)

from tests.tiny import TINY_CONFIGS, VOCAB_SIZE, tiny_model
from tether.text.models.layers import Packed, context_length, spec_of, use_tether_attention
from tether.text.models.load import load_causal_lm
from tether.text.models.output import hidden_states
from tether.text.models.packing_check import PackingDiffers, compare_packing, disable_dropout, prepare_for_packing
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

FLOAT32_INSIDE = (
    "gemma2",
    "gemma3",
    "deepseek_v3",
)  # norm or router, whatever the model's dtype: no exactness beyond it


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def weighted_sum(hidden: torch.Tensor) -> torch.Tensor:
    """A loss that every output enters with a weight of its own."""
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum()


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_packed_equals_separate_and_transformers(name, packed):
    ids, positions, layout = packed
    model = tiny_model(name, dtype=torch.float64)
    parts = [part[None] for part in ids[0].split(list(layout.lengths))]
    with torch.no_grad():
        eager = torch.cat([model.base_model(part).last_hidden_state[0] for part in parts])
    use_tether_attention(model)

    together = hidden_states(model, ids, positions, layout)
    weighted_sum(together).backward()
    together_grads = gradients(model)
    alone = [Packed((part.shape[1],)) for part in parts]
    separate = torch.cat(
        [hidden_states(model, part, one.position_ids(), one) for part, one in zip(parts, alone, strict=True)]
    )
    weighted_sum(separate).backward()
    separate_grads = gradients(model)

    exact = name not in FLOAT32_INSIDE
    assert torch.allclose(together, separate, rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
    assert torch.allclose(together, eager, rtol=1e-5, atol=1e-5)  # eager's softmax runs in float32
    assert together_grads.keys() == separate_grads.keys()
    for key, grad in together_grads.items():
        error = (grad - separate_grads[key]).norm() / separate_grads[key].norm().clamp(min=1e-12)
        assert error <= (1e-10 if exact else 1e-5), key


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_a_sequence_does_not_see_its_neighbours(name, packed):
    """The other sequences' tokens all change; the second sequence's output does not."""
    ids, positions, layout = packed
    model = tiny_model(name, dtype=torch.float64)
    use_tether_attention(model)
    others = (ids * 31 + 5) % VOCAB_SIZE
    start, stop = layout.lengths[0], layout.lengths[0] + layout.lengths[1]
    others[:, start:stop] = ids[:, start:stop]
    with torch.no_grad():
        one, two = (hidden_states(model, x, positions, layout)[start:stop] for x in (ids, others))
    tolerance = 1e-5 if name in FLOAT32_INSIDE else 1e-12
    assert torch.allclose(one, two, rtol=tolerance, atol=tolerance)


def test_disable_dropout_makes_train_mode_deterministic(packed):
    model = tiny_model("qwen2", attention_dropout=0.5)
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    disable_dropout(model)
    use_tether_attention(model)
    with torch.no_grad():
        expected = hidden_states(model, *packed)
        model.train()
        assert torch.equal(hidden_states(model, *packed), expected)
        model.set_attn_implementation("eager")
        ids = packed[0][:, :5]
        assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_self_test_passes(name, dtype):
    model = tiny_model(name, dtype=dtype).train()
    prepare_for_packing(model)
    assert model.training
    assert model.config._attn_implementation == "tether"


def test_rounding_of_16_bits_is_told_from_a_leak() -> None:
    """A policy whose training made its attention sharp is loaded again, and none of its bits changes."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 10
            layer.self_attn.k_proj.weight *= 10
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PackingDiffers):
        compare_packing(model, torch.bfloat16)
    prepare_for_packing(model)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    with pytest.raises(ValueError, match="so tether cannot"):
        prepare_for_packing(AutoModelForCausalLM.from_config(UNFIT["attention of its own"]).bfloat16())


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNFIT = {
    "state that runs on": MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, initializer_range=0.2, pad_token_id=0
    ),
    "convolution across tokens": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "attention of its own": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
    "attention sinks": GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_class_that_packing_does_not_fit_is_refused_by_name(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(UNFIT[kind])
    with pytest.raises(ValueError, match=f"{type(model).__name__}: packed sequences have different hidden states"):
        prepare_for_packing(model)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
OTHERWISE_BUILT = {
    "reads the decoder, not the backbone": (
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64),
        "OPTForCausalLM: its forward pass does not run its backbone OPTModel",
    ),
    "is an encoder-decoder's half": (
        BartConfig(vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64),
        "BartForCausalLM: its forward pass does not run its backbone BartDecoderWrapper",
    ),
    "makes a mask in each layer": (
        DogeConfig(**SIZES, num_key_value_heads=2, intermediate_size=64),
        "DogeForCausalLM: does not run on transformers' attention functions, .* creates its own mask",
    ),
}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_and_not_the_class(value, tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1 of its weights have NaN or infinity, first model\.layers\.1\.mlp"):
        prepare_for_packing(model)
    with pytest.raises(ValueError, match=f"{tmp_path}: 1 of its weights"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_finite_weights_whose_outputs_overflow_are_told_from_an_unfit_class():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(ValueError, match=r"its logits have NaN or infinity, although .* overflow torch.float32"):
        prepare_for_packing(model)


@pytest.mark.parametrize("kind", OTHERWISE_BUILT)
def test_a_class_that_is_built_otherwise_is_refused_by_name(kind):
    config, message = OTHERWISE_BUILT[kind]
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        prepare_for_packing(model)


def test_an_output_head_that_tether_does_not_know_is_refused():
    class ShiftedLlama(type(tiny_model("llama"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + torch.arange(out.logits.shape[-1])
            return out

    model = ShiftedLlama(LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match="ShiftedLlama: packed sequences have different logits"):
        prepare_for_packing(model)


JOINT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
OWN_ATTENTION = {
    "GPT-J": GPTJConfig(**JOINT, rotary_dim=4),
    "CodeGen": CodeGenConfig(**JOINT, rotary_dim=4),
    "GPT-Neo": GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
}


def test_a_class_that_would_be_sampled_without_context_is_refused():
    for kind, config in OWN_ATTENTION.items():
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match="would sample each token without its context") as refusal:
            prepare_for_packing(model)
        assert type(model).__name__ in str(refusal.value), kind


def test_keys_that_are_cached_by_layer_are_compared_with_the_whole_sequence():
    """DiffLlama attends twice in a layer, and here a layer runs twice: the second time overwrites the first's keys."""
    with pytest.raises(ValueError, match="DiffLlamaForCausalLM: tokens that are run one at a time over cached keys"):
        prepare_for_packing(AutoModelForCausalLM.from_config(DiffLlamaConfig(**SMALL)))
    model = tiny_model("llama")
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="LlamaForCausalLM: tokens that are run one at a time over cached keys give"):
        prepare_for_packing(model)


def test_a_window_that_only_the_mask_has_is_seen_whatever_its_size():
    """Qwen2-MoE's attention modules know nothing of its window; those of Cohere 2 hand theirs on."""
    window = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    with pytest.raises(ValueError, match="a window or chunks that only transformers' mask has"):
        prepare_for_packing(tiny_model("qwen2_moe", max_position_embeddings=8192, **window))
    prepare_for_packing(tiny_model("qwen2_moe", max_position_embeddings=4096, **window))  # never crosses its window
    config = Cohere2Config(**SMALL, sliding_window=4096, layer_types=["sliding_attention", "full_attention"])
    model = AutoModelForCausalLM.from_config(config)
    prepare_for_packing(model)
    assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == 4096
    for name in ("mistral", "gemma3"):
        model = tiny_model(name, sliding_window=4096, max_position_embeddings=8192)
        prepare_for_packing(model)
        assert spec_of(model.model.layers[0].self_attn).sliding_window == 4096


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 24}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
GROWING = {
    "longrope": (Phi3Config, 64, LONGROPE),
    "dynamic": (LlamaConfig, 24, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
}


@pytest.mark.parametrize("kind", GROWING)
def test_angles_never_depend_on_the_rows_beside(kind):
    config_class, positions, rope = GROWING[kind]
    original = {"original_max_position_embeddings": 24} if kind == "longrope" else {}
    config = config_class(**SMALL | original, max_position_embeddings=positions, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).double()
    assert context_length(config) == 24
    prepare_for_packing(model)

    def states(*lengths: int) -> torch.Tensor:
        layout = Packed(lengths)
        return hidden_states(model, torch.arange(sum(lengths))[None], layout.position_ids(), layout)

    with torch.no_grad():
        torch.testing.assert_close(states(10), states(10, 24)[:10])
        with pytest.raises(
            ValueError, match=f"25 tokens exceeds the model's original length of 24, .* {kind} positions"
        ):
            states(10, 25)
    with pytest.raises(ValueError, match=r"20 prompt tokens \+ 8 new tokens exceed the model's context of 24 tokens"):
        NativeEngine(model, eos_token_ids=frozenset()).generate([[5] * 20], SamplingParams(8), NoiseKey(0, 0))
    reached = NativeEngine(model, eos_token_ids=frozenset()).generate([[5] * 20], SamplingParams(4), NoiseKey(0, 0))
    assert reached.response_length.tolist() == [4]
