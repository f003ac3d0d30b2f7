"""An efficient forward pass for sampling: the layers of common decoder families, in few and large operations.

In a decoding step of transformers' own forward about as much time is spent between the matrix products as in them. This
one computes the same function of the same weights. It supports the classes in `FAMILIES`, whose modules it finds by
name, and is compared with transformers' forward before it is used. All other classes run with transformers.

Legend: R rows of Q tokens, N = R * Q, H query and K key/value heads, D = head size, E = hidden size, V = vocabulary.

Linear layers that read the same input are computed as one product, with the following operation fused into it.

A kernel may need weights in its own memory layout (`tether.kernels.cpu.backend.Cpu.pack_linears`). A `Product` stores a
copy in this layout, refreshed after each update. If the backend needs none, nothing is copied.

A backend may record the kernels of a decoding step, and replay them for later steps that use the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.kernels import FEW_ROWS, AttentionLayout, Epilogue, PackedLinears, RecordedKernels, Reference, kernels_for
from tether.text.models.layers import Packed, RMSNorm, rotated, spec_of
from tether.text.models.output import lm_head_of
from tether.text.models.packing_check import SELF_TEST_TOLERANCE
from tether.text.sampling.kv_cache import Decode


class Product:
    """The concatenated outputs of some linear layers: [N, E] -> [N, sum of their widths].

    Args:
        layers: layers that read the same input.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._packed: PackedLinears | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack the layers' current weights again."""
        self._packed = None  # first, so that the new copy reuses the memory of the old one
        self._packed = kernels_for(self._layers[0].weight).pack_linears(self._layers)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return self._product(x, Epilogue.NONE, None)

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU of the product."""
        return self._product(x, Epilogue.SILU, None)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return the product times `factor`."""
        return self._product(x, Epilogue.TIMES, factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """Return the product plus `summand`."""
        return self._product(x, Epilogue.PLUS, summand)

    def _product(self, x: Tensor, epilogue: Epilogue, other: Tensor | None) -> Tensor:
        return kernels_for(x).linears(x, self._layers, self._packed, epilogue, other)


FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TEST_TOKENS = 19

Rotations = dict[str | None, tuple[Tensor, Tensor]]
"""Cosine and sine [N, D] for each kind of layer."""


class Decoder:
    """The forward pass of one model, using the model's modules and packed copies of weights where a `Product` has them.

    Args:
        model: a model that `decoder_for` supports, on its device and in the sampling dtype.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._backbone = cast(Any, model.base_model)
        self._layers = [Layer(module) for module in self._backbone.layers]
        self._lm_head = lm_head_of(model)
        self._head = Product([cast(nn.Linear, model.get_output_embeddings())])
        self._stamp = self._current_stamp()

    def reads_positions(self) -> bool:
        """Return whether the CPU reads positions, as for rotary frequencies that depend on the longest row."""
        kinds = getattr(self._backbone.rotary_emb, "rope_type", "default")
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        return any("dynamic" in kind or kind == "longrope" for kind in kinds)

    def __call__(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | None) -> Tensor:
        """Return logits [M, V] at the flat positions `keep` [M], or [N, V] at all positions.

        Args:
            ids: [R, Q] tokens.
            positions: [R, Q] position of each token in its sequence.
            layout: which tokens each token attends to.
            keep: flat positions for which to return logits; None: all.
        """
        x, rotations = self.begin(ids, positions)
        return self.end(self.middle(x, rotations, layout, ids.shape, keep))

    def begin(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotations]:
        """Return the embeddings [N, E] of the tokens, and the rotations of their queries and keys."""
        x: Tensor = self._backbone.embed_tokens(ids)
        return x.flatten(0, 1), self._rotations(x, positions)

    def middle(
        self, x: Tensor, rotations: Rotations, layout: AttentionLayout, shape: torch.Size, keep: Tensor | None
    ) -> Tensor:
        """Return the output head's product with the layers' output; this is the expensive stage."""
        for layer in self._layers:
            x = layer(x, rotations[layer.kind], layout, shape)
        return self._head(self._backbone.norm(x if keep is None else x[keep]))

    def end(self, logits: Tensor) -> Tensor:
        """Convert the output of `middle` to logits, in place."""
        if self._lm_head.scale != 1.0:
            logits = logits.mul_(self._lm_head.scale)
        cap = self._lm_head.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def refresh(self) -> None:
        """Repack the weights if the model's parameters have changed."""
        stamp = self._current_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._head.refresh()
            for layer in self._layers:
                layer.refresh()

    def _current_stamp(self) -> list[tuple[int, int]]:
        """Return address and version of each parameter."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self._model.parameters()]

    def _rotations(self, x: Tensor, positions: Tensor) -> Rotations:
        rotary = self._backbone.rotary_emb
        if hasattr(rotary, "layer_types"):  # different bases for local and global layers
            return {kind: _flat(*rotary(x, positions, kind)) for kind in rotary.layer_types}
        both = _flat(*rotary(x, positions))
        return dict.fromkeys([layer.kind for layer in self._layers], both)


class Layer:
    """One decoder layer: attention, then a gated MLP, each with a preceding norm (Gemma: also a following one) and a
    residual."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.kind: str | None = getattr(attention, "layer_type", None)
        self._size: int = attention.head_dim
        self._heads: int = attention.q_proj.out_features // self._size
        self._kv_heads: int = attention.k_proj.out_features // self._size
        self._spec = spec_of(attention)
        self._in = Product([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = Product([attention.o_proj])
        self._gate, self._up, self._down = Product([mlp.gate_proj]), Product([mlp.up_proj]), Product([mlp.down_proj])
        self._activation = None if getattr(mlp.config, "hidden_act", None) == "silu" else mlp.act_fn
        self._before_attention: RMSNorm = module.input_layernorm
        self._of_query: RMSNorm | None = getattr(attention, "q_norm", None)
        self._of_key: RMSNorm | None = getattr(attention, "k_norm", None)
        self._after_mlp: RMSNorm | None = getattr(module, "post_feedforward_layernorm", None)
        is_between = self._after_mlp is not None
        self._after_attention: RMSNorm | None = module.post_attention_layernorm if is_between else None
        self._before_mlp: RMSNorm = module.pre_feedforward_layernorm if is_between else module.post_attention_layernorm

    def __call__(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], layout: AttentionLayout, shape: torch.Size
    ) -> Tensor:
        """Return the hidden states [N, E] of R rows of Q tokens (`shape`) after this layer."""
        mixed = self._attend(self._before_attention(x), rotation, layout, shape)
        after = self._after_attention
        x = self._out.plus(mixed, x) if after is None else x + after(self._out(mixed))
        h = self._before_mlp(x)
        gate = self._gate.silu(h) if self._activation is None else self._activation(self._gate(h))
        h = self._up.times(h, gate)
        return self._down.plus(h, x) if self._after_mlp is None else x + self._after_mlp(self._down(h))

    def refresh(self) -> None:
        """Repack the module's current weights."""
        for attribute in vars(self).values():
            if isinstance(attribute, Product):
                attribute.refresh()

    def _attend(self, h: Tensor, rotation: tuple[Tensor, Tensor], layout: AttentionLayout, shape: torch.Size) -> Tensor:
        """Return [N, H * D], before the output projection, from [N, E]."""
        heads = self._in(h).view(len(h), -1, self._size)
        turned, value = heads.split([self._heads + self._kv_heads, self._kv_heads], dim=1)
        if self._of_query is None or self._of_key is None:
            query, key = rotated(turned, *rotation).split([self._heads, self._kv_heads], dim=1)
        else:
            query, key = turned.split([self._heads, self._kv_heads], dim=1)
            query, key = rotated(self._of_query(query), *rotation), rotated(self._of_key(key), *rotation)
        query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        return layout.attend(query, key, value, self._spec).transpose(1, 2).reshape(len(h), -1)


def _flat(cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    return cosine.flatten(0, 1), sine.flatten(0, 1)


def decoder_for(model: PreTrainedModel) -> Decoder | None:
    """Return the efficient forward of a model; None if its class is unsupported, or its layers differ from those of the
    class.

    Args:
        model: a model with tether's attention enabled.
    """
    if type(model).__name__ not in FAMILIES:
        return None
    for name, module in model.named_modules():
        if name.endswith(PROJECTIONS) and type(module) is not nn.Linear:
            return None
        if name.endswith("norm") and type(module) is not RMSNorm:
            return None
    decoder = Decoder(model)
    layout = Packed((_TEST_TOKENS,))
    positions = layout.position_ids(model.device)
    ids = (positions * 7919 + 101) % model.config.get_text_config().vocab_size
    with torch.no_grad():
        logits = decoder(ids, positions, layout, None).double()
        options = {"use_cache": False, "attention_layout": layout}
        expected = model(input_ids=ids, position_ids=positions, **options).logits[0].double()
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    return decoder if error.mean() <= SELF_TEST_TOLERANCE[model.dtype] else None


Result = TypeVar("Result")


class RepeatedStep:
    """Calls a step of a generation, or replays its recording.

    The first step on new memory is called normally, so that kernels choose their algorithms; the second is recorded.
    A replayed step overwrites the result of the previous step.

    Args:
        kernels: backend of the model's device and dtype; if it cannot capture, callers pass an empty `memory`.
    """

    def __init__(self, kernels: Reference) -> None:
        self._kernels = kernels
        self._memory: tuple[int, ...] = ()
        self._recorded: tuple[Any, RecordedKernels] | None = None

    def __call__(self, memory: tuple[int, ...], step: Callable[[], Result]) -> Result:
        """Return the result of the step.

        Args:
            memory: identifies the memory that the step uses; empty: the memory is not fixed.
            step: the function to call.
        """
        if not memory or memory != self._memory:
            self._memory, self._recorded = memory, None
            return step()
        if self._recorded is None:
            self._recorded = self._kernels.capture(step)
        result, recording = self._recorded
        recording.run()
        return result


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded step, with its inputs and its output."""

    cache: tuple[int, ...]
    inputs: list[Tensor]
    product: Tensor
    recording: RecordedKernels


class ReplayedDecoder:
    """The forward pass of one generation. A decoding step that consists of kernels only is recorded and replayed.

    A replayed step overwrites the logits of the previous step.

    Args:
        decoder: the decoder, whose weights must not change or move.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.is_device_only = not decoder.reads_positions()
        """Whether a decoding step neither waits for the device nor reads from it."""
        self._step: _RecordedStep | None = None
        self._has_only_kernels: dict[int, bool] = {}

    def __call__(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | None) -> Tensor:
        x, rotations = self._decoder.begin(ids, positions)

        def middle() -> Tensor:
            return self._decoder.middle(x, rotations, layout, ids.shape, keep)

        kind = min(len(x), FEW_ROWS + 1)  # larger numbers of rows use the same kernels
        cache = layout.memory() if isinstance(layout, Decode) and self._has_only_kernels.get(kind, True) else ()
        if not cache:
            return self._decoder.end(middle())
        inputs = [x, *(tensor for pair in rotations.values() for tensor in pair)]
        if self._step is not None and self._step.cache == cache:
            for old, new in zip(self._step.inputs, inputs, strict=True):
                old.copy_(new)
            self._step.recording.run()
            return self._decoder.end(self._step.product)
        self._step = None  # first, so that the new recording reuses the memory of the old one
        product, recording = kernels_for(x).record(middle, watched=kind not in self._has_only_kernels)
        self._has_only_kernels[kind] = recording is not None
        self._step = None if recording is None else _RecordedStep(cache, inputs, product, recording)
        return self._decoder.end(product)
