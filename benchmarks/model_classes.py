"""Which causal language models of transformers tether samples as transformers does: python -m benchmarks.model_classes

Each class is built tiny with random weights and with windows and chunks that are shorter than the prompt. It is loaded
as a user's model is, which refuses what tether cannot train, and then continues a prompt greedily. The continuation is
compared with that of transformers' own forward pass over the whole sequence.

The exit status is 1 if a class was loaded and continues the prompt differently.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from tether.text.models.load import prepare_model
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

SAME, REFUSED, WRONG, NOT_BUILT = "same tokens", "refused", "OTHER TOKENS", "not built"
NEW_TOKENS = 8
PROMPT = [(i * 7919 + 101) % 250 + 5 for i in range(30)]
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 260),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "num_selects"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "local_window_size"), 8),
    "rotary_dim": 4,
    "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": 8,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "block_types")


def small(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a config of the class with every size that it has made tiny."""
    known = config_class().to_dict()
    sizes: dict[str, object] = {
        name: size for name, size in SIZES.items() if name in known and isinstance(known[name], int | None)
    }
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)  # which is then that of the rotated part
    if config_class is GPTNeoConfig:
        sizes["attention_types"] = [[["global", "local"], 1]]
    lists = {name: _shortened(known[name]) for name in LAYER_LISTS if isinstance(known.get(name), list)}
    for extra in ({}, lists):  # most classes make their lists from the number of layers
        try:
            config = config_class(**sizes | {"initializer_range": 0.2} | extra)
        except Exception as error:  # noqa: BLE001  # whatever a class of a stranger raises
            failure = error
        else:
            return config
    raise failure


def _shortened(layers: list[object]) -> list[object]:
    kinds = list(dict.fromkeys(layers))
    return (kinds * 2)[:2]


def built(only: str) -> Iterator[tuple[str, PreTrainedModel | str]]:
    """Yield each causal class with `only` in its name, tiny and random, or why it was not built."""
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        name = names if isinstance(names, str) else names[0]
        if only.lower() not in name.lower():
            continue
        try:
            config = small(CONFIG_MAPPING[kind])
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size:,} parameters")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            _continued(copy.deepcopy(model), 1)
        except Exception as error:  # noqa: BLE001  # whatever a class of a stranger raises
            yield name, f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            yield name, model


@torch.no_grad()
def _continued(model: PreTrainedModel, new_tokens: int) -> list[int]:
    """Return transformers' greedy continuation, by its forward pass over the whole sequence each time."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1)[:, None]], 1)
    return ids[0, len(PROMPT) :].tolist()


def judge(model: PreTrainedModel) -> tuple[str, str]:
    """Return what becomes of a model that a user names, and a reason or the tokens."""
    expected = _continued(copy.deepcopy(model), NEW_TOKENS)
    try:
        engine = NativeEngine(prepare_model(model), eos_token_ids=frozenset())
        sampled = engine.generate([PROMPT], SamplingParams(NEW_TOKENS, temperature=0.0), NoiseKey(1, 0))
    except ValueError as error:
        return REFUSED, str(error)
    tokens = sampled.response_ids[0].tolist()
    return (SAME, "") if tokens == expected else (WRONG, f"{tokens}, transformers: {expected}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each class, and the counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_classes", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="classes with this in their name")
    chosen = parser.parse_args(arguments)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for name, model in built(chosen.only):
        verdict, reason = (NOT_BUILT, model) if isinstance(model, str) else judge(model)
        counts[verdict] += 1
        print(f"{name:44} {verdict:12} {reason[:200]}", flush=True)
    print(", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common()))
    return int(counts[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(main())
