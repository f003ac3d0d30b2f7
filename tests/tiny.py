"""Tiny random models of the real transformers classes, and a tokenizer for them: everything offline, in milliseconds.

The weights are drawn ten times wider than transformers would (std 0.2), so that attention and logits are far from
uniform: a leak between packed sequences or a wrong mask then changes the output visibly, and greedy choices do not tie.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD, BOS, IM_START, EOS = "<pad>", "<s>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, IM_START, EOS)  # ids 0, 1, 2, 3; the 256 bytes follow
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
PAD_ID, BOS_ID, EOS_ID = 0, 1, 3
WINDOW = 4  # of every sliding layer: small, so that short sequences cross it

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}

TINY_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **kw: LlamaConfig(**_COMMON | kw),
    "qwen2": lambda **kw: Qwen2Config(**_COMMON | {"tie_word_embeddings": True} | kw),
    "qwen3": lambda **kw: Qwen3Config(**_COMMON | {"head_dim": 8} | kw),
    "mistral": lambda **kw: MistralConfig(**_COMMON | {"sliding_window": WINDOW} | kw),
    "gemma2": lambda **kw: Gemma2Config(**_COMMON | _GEMMA | kw),  # layers alternate, both softcaps on
    "gemma3": lambda **kw: Gemma3TextConfig(
        **_COMMON | _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]} | kw
    ),
    "qwen2_moe": lambda **kw: Qwen2MoeConfig(
        **_COMMON
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
        | kw
    ),
    "qwen3_moe": lambda **kw: Qwen3MoeConfig(
        **_COMMON
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        }
        | kw
    ),
    "deepseek_v3": lambda **kw: DeepseekV3Config(
        **_COMMON
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,  # the first layer is dense, the second has experts
        }
        | kw
    ),
}
"""Name -> function of config overrides. All fit `tiny_tokenizer` (vocabulary, special ids)."""

MOE = ("qwen2_moe", "qwen3_moe", "deepseek_v3")


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A randomly initialised causal LM of the class behind `name`, in eval mode, with transformers' own attention.

    The global random state is left as it was. Experts run one by one: the grouped matmul takes no float64.
    """
    config = TINY_CONFIGS[name](**overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if name in MOE:
        model.set_experts_implementation("eager")
    return model.eval()


def tiny_tokenizer(*, chat_template: bool = True, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a UTF-8 byte, any text round-trips, ChatML template.

    Args:
        chat_template: False for a tokenizer without one.
        add_bos: put ``<s>`` in front of every encoded text, as Llama's tokenizers do.
    """
    tokens = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[IM_START],
    )
    fast.chat_template = CHATML if chat_template else None
    return fast


def save_tiny(path: Path, name: str = "llama", *, chat_template: bool = True, **kwargs: Any) -> Path:
    """Write model and tokenizer as a Hugging Face directory, the way a user's model looks; returns `path`."""
    tiny_model(name, **kwargs).save_pretrained(path)
    tiny_tokenizer(chat_template=chat_template).save_pretrained(path)
    return path


def save_tiny_reward_model(
    path: Path, name: str = "llama", *, chat_template: bool = True, seed: int = 0, **overrides: Any
) -> Path:
    """Write a sequence classifier with one output and its tokenizer as a Hugging Face directory; returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(TINY_CONFIGS[name](**{"num_labels": 1} | overrides))
    model.save_pretrained(path)
    tiny_tokenizer(chat_template=chat_template).save_pretrained(path)
    return path
