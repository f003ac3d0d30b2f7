"""Sizes of a language model, from its `config.json` or from a table of known models."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tether.runtime.cache import cache_dir
from tether.spelling import did_you_mean


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of DeepSeek's attention, whose keys and values are compressed."""

    kv_rank: int
    query_rank: int
    """Rank of the query projection; 0 if it is a single full matrix."""
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder. A dense model has 0 experts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Width of the MLP of a dense layer."""
    vocabulary: int
    tied: bool = False
    """Whether the output head shares the weights of the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """Number of norms per layer."""
    experts: int = 0
    active_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """Width of the shared expert, which every token passes."""
    shared_gate: bool = False
    dense_layers: int = 0
    """Number of first layers without experts, in a mixture of experts."""
    latent: LatentAttention | None = None
    named: str = "the model"
    source: str = ""
    """Where the sizes come from."""

    @property
    def embedding(self) -> int:
        """Number of weights of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def outside_layers(self) -> int:
        """Number of weights outside of the layers: embedding, head and last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def attention(self) -> int:
        """Number of attention weights in matrices, per layer."""
        latent = self.latent
        if latent is None:
            return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        query_size = self.heads * (latent.nope + latent.rope)
        query = self.hidden * query_size
        if latent.query_rank:
            query = latent.query_rank * (self.hidden + query_size)
        compressed = self.hidden * (latent.kv_rank + latent.rope)
        expanded = latent.kv_rank * self.heads * (latent.nope + latent.value)
        return query + compressed + expanded + self.heads * latent.value * self.hidden

    @property
    def small(self) -> int:
        """Number of weights of a layer in vectors: norms and biases."""
        bias = self.head_size * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        latent = self.latent.kv_rank + self.latent.query_rank if self.latent else 0
        return self.norms * self.hidden + bias + (2 * self.head_size if self.qk_norm else 0) + latent

    @property
    def expert(self) -> int:
        """Number of weights of an expert."""
        return 3 * self.hidden * self.expert_width

    def layer(self, index: int) -> int:
        """Return the number of weights of a layer."""
        return self.attention + self.small + self.mlp(index)

    def mlp(self, index: int) -> int:
        """Return the number of weights of a layer's MLP, including all experts and the router."""
        if not self._is_mixture(index):
            return 3 * self.hidden * self.intermediate
        router = self.experts * self.hidden + (self.hidden if self.shared_gate else 0)
        return self.experts * self.expert + 3 * self.hidden * self.shared_width + router

    def active_layer(self, index: int) -> int:
        """Return the number of weights of a layer that process one token: of the experts, only the active ones."""
        if not self._is_mixture(index):
            return self.attention + 3 * self.hidden * self.intermediate
        used = self.active_experts * self.expert + 3 * self.hidden * self.shared_width + self.experts * self.hidden
        return self.attention + used

    def _is_mixture(self, index: int) -> bool:
        return bool(self.experts) and index >= self.dense_layers

    @property
    def largest_layer(self) -> int:
        """Number of weights of the largest layer."""
        return max(self.layer(0), self.layer(self.layers - 1))

    @property
    def in_layers(self) -> int:
        """Number of weights of all layers."""
        return sum(map(self.layer, range(self.layers)))

    @property
    def active_in_layers(self) -> int:
        """Number of weights of all layers that process one token."""
        return sum(map(self.active_layer, range(self.layers)))

    @property
    def parameters(self) -> int:
        """Number of all weights."""
        return self.outside_layers + self.in_layers

    @property
    def critic_parameters(self) -> int:
        """Number of weights with a scalar head instead of the output head."""
        return self.embedding + 2 * self.hidden + self.in_layers

    @property
    def kv_per_token(self) -> int:
        """Number of keys and values per token in all layers; the native cache expands those of latent attention."""
        if self.latent:
            return self.layers * self.heads * (self.latent.nope + self.latent.rope + self.latent.value)
        return 2 * self.layers * self.kv_heads * self.head_size

    @property
    def mlp_width(self) -> int:
        """Number of MLP activations per token and layer."""
        if self.experts:
            return self.active_experts * self.expert_width + self.shared_width
        return self.intermediate

    def adapter(self, rank: int, tensor: int = 1) -> int:
        """Return the number of weights of LoRA adapters on all linear layers, except fused experts.

        With tensor parallelism over `tensor` ranks, return the number per rank; an adapter is split along the same side
        as its layer.
        """
        query, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        mlp = self.shared_width if self.experts else self.intermediate
        split = [query, kv, kv, query, *([mlp] * 3 if mlp else [])]
        return self.layers * rank * sum(self.hidden + width // tensor for width in split)


def _qwen2(hidden: int, layers: int, heads: int, kv: int, width: int, vocabulary: int, tied: bool) -> Architecture:
    return Architecture(hidden, layers, heads, kv, 128 if hidden > 896 else 64, width, vocabulary, tied, qkv_bias=True)


def _qwen3(hidden: int, layers: int, heads: int, kv: int, width: int, tied: bool) -> Architecture:
    return Architecture(hidden, layers, heads, kv, 128, width, 151936, tied, qk_norm=True)


def _llama(
    hidden: int, layers: int, heads: int, kv: int, width: int, vocabulary: int = 128256, tied: bool = False
) -> Architecture:
    return Architecture(hidden, layers, heads, kv, hidden // heads, width, vocabulary, tied)


KNOWN: dict[str, Architecture] = {
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, tied=True),
    "smollm2-360m": _llama(960, 32, 15, 5, 2560, 49152, tied=True),
    "smollm2-1.7b": _llama(2048, 24, 32, 32, 8192, 49152, tied=True),
    "qwen2-0.5b": _qwen2(896, 24, 14, 2, 4864, 151936, True),
    "qwen2-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2-7b": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "qwen2-72b": _qwen2(8192, 80, 64, 8, 29568, 152064, False),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29568, 152064, False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288, False),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408, False),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600, False),
    "qwen3-30b-a3b": replace(
        _qwen3(2048, 48, 32, 4, 6144, False), experts=128, active_experts=8, expert_width=768
    ),
    "qwen3-235b-a22b": replace(
        _qwen3(4096, 94, 64, 4, 12288, False), experts=128, active_experts=8, expert_width=1536
    ),
    "qwen1.5-moe-a2.7b": replace(
        _qwen2(2048, 24, 16, 16, 5632, 151936, False),
        experts=60, active_experts=4, expert_width=1408, shared_width=5632, shared_gate=True,
    ),
    "moonlight-16b-a3b": Architecture(
        2048, 27, 16, 16, 192, 11264, 163840,
        experts=64, active_experts=6, expert_width=1408, shared_width=2816, dense_layers=1,
        latent=LatentAttention(kv_rank=512, query_rank=0, nope=128, rope=64, value=128),
    ),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336),
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672),
    "llama-3.2-1b": replace(_llama(2048, 16, 32, 8, 8192, tied=True), head_size=64),
    "llama-3.2-3b": replace(_llama(3072, 28, 24, 8, 8192, tied=True), head_size=128),
    "deepseek-llm-7b": _llama(4096, 30, 32, 32, 11008, 102400),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32768),
    "gemma-2-2b": Architecture(2304, 26, 8, 4, 256, 9216, 256000, tied=True, norms=4),
}  # fmt: skip
"""Published sizes, from each model's own `config.json`."""
SYNONYMS = {
    "meta-llama-3.1": "llama-3", "meta-llama-3": "llama-3", "llama-3.1": "llama-3", "llama-3.3": "llama-3",
    "llama3": "llama-3", "qwen2.5-coder": "qwen2.5", "qwen2.5-math": "qwen2.5", "deepseek-math": "deepseek-llm",
    "fsfairx-llama3": "llama-3-8b", "skywork-reward-v2-": "",
}  # fmt: skip
"""Prefixes of names of models that have the same sizes as a known model."""
_ENDINGS = re.compile(r"-(instruct|chat|it|base|hf|rm-v0\.1|rm|v\d[\w.]*|\d{4}|rl|sft|bf16|zh|thinking|gguf)$")
_QUANTIZED = re.compile(
    r"(?:^|[-_.])(gptq|awq|bnb|eetq|aqlm|hqq|fp8|[mn][vx]?fp4|nf4|w\dax?\d+|int[48]|[48]-?bit)(?=$|[-_.])"
)


def from_config(config: Mapping[str, object], named: str) -> Architecture:
    """Return the sizes given by the contents of a `config.json`.

    Raises:
        ValueError: a size is missing; the message names the key.
    """
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(f"{named}: {_quantized(method)}")
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, dict) else dict(config)

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(results := values.get(name), int):
                return int(results)
        if default is None:
            raise ValueError(f"{named}: its config.json has no {names[0]}, so its memory cannot be computed")
        return default

    kind, hidden, heads = str(values.get("model_type", "")), number("hidden_size"), number("num_attention_heads")
    experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    expert_width = number("moe_intermediate_size", "intermediate_size") if experts else 0
    shared = number("shared_expert_intermediate_size", default=0)
    if experts and "n_shared_experts" in values:
        shared = number("n_shared_experts", default=0) * expert_width
    latent = None
    if "kv_lora_rank" in values:
        sizes = (number("q_lora_rank", default=0), number("qk_nope_head_dim"), number("qk_rope_head_dim"))
        latent = LatentAttention(number("kv_lora_rank"), *sizes, number("v_head_dim"))
    return Architecture(
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_size=number("head_dim", default=hidden // heads),
        intermediate=number("intermediate_size", default=0 if experts else None),
        vocabulary=number("vocab_size"),
        tied=bool(values.get("tie_word_embeddings", kind.startswith(("gemma", "smollm3", "cohere")))),
        qkv_bias=bool(values.get("attention_bias", kind.startswith("qwen2"))),
        qk_norm=kind.startswith(("qwen3", "gemma3")),
        norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        experts=experts,
        active_experts=number("num_experts_per_tok", default=2) if experts else 0,
        expert_width=expert_width,
        shared_width=shared,
        shared_gate=bool(shared) and kind == "qwen2_moe",
        dense_layers=number("first_k_dense_replace", default=0),
        latent=latent,
        named=named,
    )


def _quantized(method: object) -> str:
    return f"its weights are quantized ({method}), and quantized weights are not trained. Name the plain model."


def known_name(path: str) -> str | None:
    """Return the name in `KNOWN` for a model's path or hub id; None if it is unknown."""
    name = re.sub(r"^modelscope:", "", path).rstrip("/").rsplit("/", 1)[-1].lower()
    while (shorter := _ENDINGS.sub("", name)) != name:
        name = shorter
    for beginning, other in SYNONYMS.items():
        if name.startswith(beginning):
            name = other + name.removeprefix(beginning)
            break
    return name if name in KNOWN else None


def architecture_of(path: str, key: str) -> Architecture:
    """Return the sizes of the model at a path: a folder with `config.json`, a downloaded hub id, or a known name.

    Raises:
        ValueError: the model is unknown; the message names the key and the fix.
    """
    for folder in _folders(path):
        file = folder / "config.json"
        if file.is_file():
            try:
                sizes = from_config(json.loads(file.read_text(encoding="utf-8")), path)
                return replace(sizes, source="sizes of its config.json")
            except (OSError, json.JSONDecodeError) as error:
                raise ValueError(f"{key}={path}: {file} cannot be read ({error}). Copy it again") from None
    if quantized := _QUANTIZED.search(path.rstrip("/").rsplit("/", 1)[-1].lower()):
        raise ValueError(f"{key}={path}: {_quantized(quantized[1])}")
    name = known_name(path)
    if name is None:
        meant = did_you_mean(path.rsplit("/", 1)[-1].lower(), KNOWN)
        fetch = f"Run `hf download {path} config.json`, give" if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else "Give"
        raise ValueError(
            f"{key}={path}: the sizes of this model are not known.{meant} "
            f"{fetch} a folder with its config.json, or one of {', '.join(KNOWN)}"
        )
    return replace(KNOWN[name], named=path, source=f"sizes of {name}")


def _folders(path: str) -> list[Path]:
    """Return folders that may contain the model's config: its path, tether's cache, and the hub's cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    snapshots = hub / f"models--{path.replace('/', '--')}" / "snapshots"
    results = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    return [Path(path).expanduser(), cache_dir() / path, *results]
