"""Modules that replace those of transformers: packed attention, RMS norm, rotary embedding, gated MLP.

They call `tether.kernels` and compute the same as the modules that they replace; parameters and their names are
unchanged. They are inserted before a model is used.

Attention: transformers lets a model call an attention function by name, and passes it all keyword arguments of the
model's forward. tether registers one function, ``tether``, and passes it a *layout*: an object that decides which query
attends to which key. Packed training (`Packed`) and cached decoding (`tether.text.sampling`) are two layouts over the
same module, so both use the same weights, and no [rows, width] padding or [tokens, tokens] mask is built.

Legend: N = tokens of all sequences, concatenated, H = query heads, K = key/value heads (H = K * G), D = head size.

RMS norm: transformers uses six tensor operations; autograd saves most of their results and differentiates each of them.
`RMSNorm` saves one number per row. It also is exact in float64, where transformers' norms compute in float32: a prompt
that several responses share then has exactly the same gradient as when it is repeated.

Gated MLP: ``down(silu(gate(x)) * up(x))`` also saves less for the backward pass.

Rotary embedding: a single operation rotates queries and keys, forward and backward; transformers uses half a dozen
tensor operations for each, whose intermediate results autograd saves.

Limit on positions: transformers computes the angles of ``longrope`` and ``dynamic`` rotary embeddings from the longest
row of a batch. One row beyond the original length would change the angles of all rows that are packed with it, and a
sequence that grows beyond it would no longer match its own cached keys. Such models are limited to their original
length.

Gradient checkpointing: layers store only their inputs, and run again in the backward pass.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.kernels import AttentionLayout, AttentionSpec, kernels_for


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens of prompt and response together; None for a model without a limit."""
    text = config.get_text_config()
    lengths = (getattr(text, "max_position_embeddings", None), original_length(config))
    return min((length for length in lengths if length is not None), default=None)


def original_length(config: PreTrainedConfig) -> int | None:
    """Return the length up to which rotary angles do not depend on the longest row; None if they never do."""
    text = config.get_text_config()
    lengths = []
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope":
            lengths.append(rope.get("original_max_position_embeddings", text.max_position_embeddings))
        elif "dynamic" in kind:
            lengths.append(text.max_position_embeddings)
    return min(lengths, default=None)


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Return the rotary settings of a config: one mapping, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [one for one in rope.values() if isinstance(one, Mapping)]
    yield from nested if "rope_type" not in rope and nested else [rope]


def limit_positions(model: PreTrainedModel) -> None:
    """Make a model refuse positions beyond its original length if its rotary angles would depend on the longest row."""
    limit = original_length(model.config)
    if limit is None:
        return
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "rope_type") and not hasattr(module, "position_limit"):
            module.__dict__["position_limit"] = limit
            module.register_forward_pre_hook(partial(_check_positions, limit), with_kwargs=True)


def _check_positions(limit: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    longest = int(positions.max()) + 1
    if longest > limit:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds the model's original length of {limit}, beyond which its "
            f"{module.rope_type} positions depend on the longest sequence of a batch. Shorten prompts and responses "
            "(data.max_prompt_length, data.max_response_length, data.max_length)"
        )


OFFSETS = {
    "LlamaRMSNorm": 0.0,
    "MistralRMSNorm": 0.0,
    "Qwen2RMSNorm": 0.0,
    "Qwen3RMSNorm": 0.0,
    "Qwen2MoeRMSNorm": 0.0,
    "Qwen3MoeRMSNorm": 0.0,
    "DeepseekV3RMSNorm": 0.0,
    "Gemma2RMSNorm": 1.0,
    "Gemma3RMSNorm": 1.0,
}
"""transformers' module -> offset that it adds to its weight. With 0 it rounds before it multiplies, otherwise after."""
GATED_MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""transformers' modules that are gated MLPs."""


def replace_modules(model: nn.Module, classes: Container[str], replacement: Callable[[Any], nn.Module]) -> None:
    """Replace modules whose class is named in `classes` by `replacement(module)`; train or eval mode is preserved."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in classes:
                new = replacement(child)
                new.training = child.training
                setattr(parent, name, new)


class RMSNorm(nn.Module):
    """RMS norm computed with `tether.kernels.reference.Reference.rms_norm`."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [.., E]."""
        return kernels_for(x, self.weight).rms_norm(x, self.weight, self.eps, self.offset)


def replace_norms(model: PreTrainedModel) -> None:
    """Replace every module named in `OFFSETS` by an `RMSNorm`; parameters and their names stay."""
    replace_modules(model, OFFSETS, _rms_norm)


def _rms_norm(norm: Any) -> RMSNorm:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return RMSNorm(norm.weight, eps, OFFSETS[type(norm).__name__])


class GatedMLP(nn.Module):
    """Replacement for one of `GATED_MLPS`, with its layers under their names."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.config, self.act_fn = mlp.config, mlp.act_fn
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., E] for hidden states [.., E]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return kernels_for(gate, up).gated_mlp(gate, up, self.down_proj)


def replace_gated_mlps(model: PreTrainedModel) -> None:
    """Replace every module named in `GATED_MLPS` with SiLU activation by a `GatedMLP`; parameters stay."""
    replace_modules(model, GATED_MLPS, lambda mlp: GatedMLP(mlp) if isinstance(mlp.act_fn, SiLUActivation) else mlp)


REPLACED = (
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Gemma2Attention",
    "Gemma3Attention",
)
"""transformers' modules that are replaced."""


def spec_of(attention: Any) -> AttentionSpec:
    """Return the attention settings of one of `REPLACED`."""
    has_own_window = hasattr(attention, "sliding_window")
    window = attention.sliding_window if has_own_window else getattr(attention.config, "sliding_window", None)
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return AttentionSpec(attention.layer_idx, attention.scaling, window, softcap)


class RotaryAttention(nn.Module):
    """Replacement for one of `REPLACED`, with all attributes under the same names."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.__dict__.update(attention.__dict__)
        self._without_layout = type(attention).forward

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        attention_layout: AttentionLayout | None = None,
        **kwargs: Any,  # position ids, the cache (its name depends on transformers' version), and so on
    ) -> tuple[Tensor, Tensor | None]:
        """Return [R, Q, E] for hidden states [R, Q, E], cosine and sine [R, Q, D]; without a layout, compute as
        transformers does."""
        if attention_layout is None:
            attended: tuple[Tensor, Tensor | None] = self._without_layout(
                self, hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return attended
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotated(query, *position_embeddings), rotated(key, *position_embeddings)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = attention_layout.attend(query, key, value, spec_of(self))
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the heads rotated by `tether.kernels.reference.Reference.rotate`."""
    return kernels_for(heads, cosine, sine).rotate(heads, cosine, sine)


def replace_attentions(model: PreTrainedModel) -> None:
    """Replace every module named in `REPLACED` by a `RotaryAttention`; parameters and their names stay."""
    replace_modules(model, REPLACED, RotaryAttention)


ATTENTION_NAME = "tether"


@dataclass(frozen=True)
class Packed:
    """Sequences concatenated in one row of N tokens; each attends causally to itself only.

    Sequences may share a prefix, as the responses to one prompt do: `prefixes` defines which segment continues which
    one, and a segment that others continue is not a sequence by itself. The layers then process a shared prompt once.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each segment."""
    prefixes: tuple[int | None, ...] | None = None
    """For each segment the index of the segment that it continues, which itself has no prefix; None: no prefixes."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        attended = kernels_for(query, key, value).packed_attention(query, key, value, self.lengths, self.prefixes, spec)
        return attended.transpose(0, 1)[None]

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Return [1, N]: each token's position in its own sequence."""
        prefixes = self.prefixes or (None,) * len(self.lengths)
        first = [0 if prefix is None else self.lengths[prefix] for prefix in prefixes]
        segments = zip(first, self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in segments])[None]


@dataclass(frozen=True)
class Padded:
    """One sequence per row, padded on the right: a causal query never sees the padding after it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return kernels_for(query, key, value).causal_attention(query, key, value, spec)


def _attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention_layout: AttentionLayout,
    **_: object,  # transformers also passes position ids, cache flags and so on
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise TypeError(f"{type(module).__name__} creates its own mask in addition to the layout")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(int(module.layer_idx), scale, sliding_window, softcap)  # type: ignore[arg-type]
    out = attention_layout.attend(query, key, value, spec)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_interface)


def use_tether_attention(model: PreTrainedModel) -> None:
    """Make a model use layouts, and replace its norms, rotary embeddings and gated MLPs.

    Its forward then requires a layout as ``attention_layout=``.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    replace_attentions(model)
    replace_norms(model)
    replace_gated_mlps(model)
    limit_positions(model)


FUNCTION = "_gradient_checkpointing_func"  # attribute in which transformers' layers look for the function
LARGE = 1 << 21  # bytes of a large page


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass; it takes effect in train mode and does not change gradients."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # depends on transformers' version
    enable({"use_reentrant": False})
    # transformers makes the embeddings require a gradient through a local function, which cannot be pickled. Only
    # reentrant checkpointing needs it.
    model.disable_input_require_grads()
    for module in model.modules():
        if hasattr(module, FUNCTION):
            setattr(module, FUNCTION, _checkpointed)


def in_own_pages(x: Any) -> Any:
    """Return the tensor in separate memory pages, if it is large and in Linux's main memory.

    Stored tensors would otherwise be interleaved with freed ones in malloc's memory, which leaves holes that are too
    small for the next layer, so that the peak of an update would be far above the memory in use.
    """
    if not isinstance(x, Tensor):  # GPT-2 passes None to its layers by position
        return x
    is_moved = sys.platform == "linux" and x.device.type == "cpu" and x.nbytes >= LARGE
    return _InOwnPages.apply(x) if is_moved else x


class _InOwnPages(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        pages = mmap.mmap(-1, x.nbytes)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=x.dtype).view(x.shape).copy_(x)

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad


def _checkpointed(layer: object, *inputs: object) -> object:
    return checkpoint(layer, *map(in_own_pages, inputs), use_reentrant=False)
