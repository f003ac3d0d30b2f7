"""The operations that have a compiled kernel: bfloat16 on a CPU under Linux."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tether.kernels.causal_attention import AttentionSpec
from tether.kernels.cpu import (
    causal_attention,
    decode_attention,
    elementwise,
    linear_amx,
    linear_avx512,
    linear_plain,
    packed_attention,
    recording,
    vocabulary,
)
from tether.kernels.cpu.amx_instructions import has_amx
from tether.kernels.cpu.avx512_instructions import has_avx512_bf16
from tether.kernels.reference import BLOCK, FEW_ROWS, Epilogue, PackedLinears, RecordedKernels, Reference, first_above
from tether.kernels.vocabulary_chunks import KeptTokenSets, VocabularyChunks, locate
from tether.types import AutogradContext

Result = TypeVar("Result")
_ONEDNN_ROWS = 64  # rows for which oneDNN chooses the shape of its blocks
_ROWS_PER_SUM = 64  # a fixed number, so that the norm weight's gradient does not depend on the threads
_EPILOGUES = {
    Epilogue.NONE: (linear_plain.PLAIN, "none"),
    Epilogue.SILU: (linear_plain.SILU, "swish"),
    Epilogue.TIMES: (linear_plain.TIMES, "mul"),
    Epilogue.PLUS: (linear_plain.PLUS, "add"),
}
"""Each epilogue in our kernels and in oneDNN's."""


class Cpu(Reference):
    """Compiled kernels; each method expects bfloat16 tensors on the CPU.

    A linear kernel needs its weight in a memory order of its own. Reordering at every call can cost as much as the
    product, so `pack_linears` does it once. With AMX or AVX-512 the product is a kernel of ours, or with AMX and very
    many rows oneDNN's, which then reorders the weights itself. Elsewhere it is oneDNN's, except for one or two rows:
    for those a kernel reads plain weights at the speed of the memory.
    """

    name = "cpu"

    def describe(self) -> str:
        linear = {linear_amx: "AMX", linear_avx512: "AVX-512"}.get(self.linear_kernels, "oneDNN")
        attention = "AVX-512" if has_avx512_bf16() else "PyTorch"
        return f"compiled kernels (linear layers while sampling: {linear}; packed attention: {attention})"

    @cached_property
    def linear_kernels(self) -> Any:
        """The module with kernels for linear layers and new tokens that suits this processor's instructions,
        or None."""
        return linear_amx if has_amx() else linear_avx512 if has_avx512_bf16() else None

    def rms_norm_forward(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        heads = x if x.dim() == 3 and x.stride()[1:] == (x.shape[2], 1) else x.contiguous().view(-1, 1, x.shape[-1])
        shaped = {"x": heads, "out": out.view(heads.shape), "scale": scale.view(heads.shape[:2])}
        elementwise.rms_norm(**shaped, weight=weight, offset=offset, eps=eps)
        return out, scale

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor, offset: float, needs_weight: bool
    ) -> tuple[Tensor, Tensor | None]:
        grad_x = torch.empty_like(x)
        group_sums = scale.new_zeros(-(-scale.numel() // _ROWS_PER_SUM), x.shape[-1])
        elementwise.rms_norm_backward(
            x=x.flatten(0, -2),
            weight=weight,
            scale=scale.flatten(),
            grad=grad.flatten(0, -2),
            grad_x=grad_x.flatten(0, -2),
            grad_weight=group_sums,
            offset=offset,
        )
        return grad_x, group_sums.sum(0) if needs_weight else None

    def gated_mlp(self, gate: Tensor, up: Tensor, down: nn.Module) -> Tensor:
        # Saves only `gate` and `up` for the backward pass.
        gate, up = gate.contiguous(), up.contiguous()
        if type(down) is not nn.Linear or down.bias is not None or down.weight.dtype != torch.bfloat16:
            out: Tensor = down(_SiluMul.apply(gate, up))
            return out
        out = _SiluMulLinear.apply(gate, up, down.weight)
        # After the tensors are saved: a recomputed layer stops there, before this product, which it does not need.
        with torch.no_grad():
            torch.mm(silu_mul(gate, up).flatten(0, -2), down.weight.T, out=out.flatten(0, -2))
        return out

    def rotate(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        turned: Tensor = _Rotation.apply(heads, cosine, sine)
        return turned

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        prefixes: tuple[int | None, ...] | None,
        spec: AttentionSpec,
    ) -> Tensor:
        if has_avx512_bf16() and packed_attention.can_attend(query.shape[2], value.shape[2]):
            return packed_attention.attention(query, key, value, lengths, prefixes, spec)
        return super().packed_attention(query, key, value, lengths, prefixes, spec)

    def attention_weights_backward(
        self, scores: Tensor, grad_weights: Tensor, log_sum: Tensor, out: Tensor, grad: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        weights, grad_scores = (torch.empty_like(scores, dtype=torch.bfloat16) for _ in range(2))
        causal_attention.weights_backward(
            scores=scores.flatten(0, 1).contiguous(),
            grad_weights=grad_weights.flatten(0, 1).contiguous(),
            log_sum=log_sum.flatten().contiguous(),
            out=out.flatten(0, 1).contiguous(),
            grad_out=grad.flatten(0, 1).contiguous(),
            weights=weights.flatten(0, 1),
            grad_scores=grad_scores.flatten(0, 1),
            scale=scale,
        )
        return weights, grad_scores

    def decode_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        position: Tensor,
        length: int,
        spec: AttentionSpec,
        biases: dict[int | None, Tensor],
    ) -> Tensor:
        rows, heads, size = query.shape
        out = query.new_empty(rows, heads, 1, values.shape[3])
        kernels, value_size = self.linear_kernels, values.shape[3]
        if kernels is None or not kernels.can_attend(heads // key.shape[1], size, value_size):
            kernels = decode_attention
        kernels.attend(
            query=query,
            key=key,
            value=value,
            position=position,
            keys=keys,
            values=values,
            out=out.squeeze(2),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            window=spec.sliding_window or 0,
        )
        return out

    def pack_linears(self, layers: Sequence[nn.Linear]) -> PackedLinears | None:
        kernels, is_ours = self.linear_kernels, self._multiplies(layers)
        if not is_ours and not has_onednn_bfloat16():
            return None
        weights = [layer.weight.detach() for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        in_blocks = torch.ops.mkldnn._reorder_linear_weight
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        return PackedLinears(kernels.packed(weight) if is_ours else in_blocks(weight, _ONEDNN_ROWS), bias)

    def linears(
        self,
        x: Tensor,
        layers: Sequence[nn.Linear],
        packed: PackedLinears | None,
        epilogue: Epilogue,
        other: Tensor | None,
    ) -> Tensor:
        ours, onednn = _EPILOGUES[epilogue]
        is_ours = self._multiplies(layers)
        if packed is not None and is_ours and len(x) <= self.linear_kernels.MAX_ROWS:
            outputs = sum(layer.out_features for layer in layers)
            product: Tensor = self.linear_kernels.linear(x, packed.weight, outputs, packed.bias, ours, other)
            return product
        if len(x) <= FEW_ROWS:  # faster than oneDNN
            return _linears_of_few_rows(x, layers, ours, other)
        if packed is None or (is_ours and len(layers) > 1):
            return super().linears(x, layers, packed, epilogue, other)
        weight = layers[0].weight if is_ours else packed.weight
        if other is None:
            product = torch.ops.mkldnn._linear_pointwise(x, weight, packed.bias, onednn, [], "")
        else:
            product = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, packed.bias, onednn)
        return product

    def _multiplies(self, layers: Sequence[nn.Linear]) -> bool:
        return self.linear_kernels is not None and self.linear_kernels.can_multiply(layers[0].in_features)

    def sample(self, logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        # Writes weights only for the block of the drawn token.
        rows, size = logits.shape
        top, mass = torch.empty(rows), torch.empty(rows, -(-size // BLOCK))
        vocabulary.exp_sums(logits=logits.contiguous(), largest=top, sums=mass, block=BLOCK, factor=1.0 / temperature)
        cumulative = mass.to(uniform.dtype).cumsum(dim=-1)
        total = cumulative[:, -1]
        block, before = first_above(cumulative, uniform * total)
        tokens = block[:, None] * BLOCK + torch.arange(BLOCK)
        scaled = (logits.gather(-1, tokens.clamp(max=size - 1)).float() - top[:, None]) / temperature
        weights = scaled.exp().masked_fill_(tokens >= size, 0.0)
        inside, _ = first_above(weights.to(uniform.dtype).cumsum(dim=-1), uniform * total - before)
        chosen = scaled.gather(-1, inside[:, None]).squeeze(-1)
        return block * BLOCK + inside, chosen - total.log().to(chosen.dtype)

    def log_sums(
        self,
        chunks: VocabularyChunks,
        targets: Tensor,
        candidates: KeptTokenSets | None,
        with_entropy: bool,
        with_sum_pi_squared: bool,
    ) -> tuple[Tensor, ...]:
        # Computes all sums together, requested or not.
        if not _is_plain(chunks, candidates):
            return super().log_sums(chunks, targets, candidates, with_entropy, with_sum_pi_squared)
        factor = chunks.transform.scale / chunks.transform.temperature
        target_z = torch.zeros(len(targets), 1, dtype=chunks.dtype)
        sums = torch.tensor([torch.finfo(chunks.dtype).min, 0, 0, 0]).repeat(len(targets), 1)
        for span, _, logits in chunks.products():
            inside, column = locate(targets, span)
            target_z = torch.where(inside, logits.gather(1, column).to(chunks.dtype).mul_(factor), target_z)
            vocabulary.add_log_sums(logits=logits, sums=sums, factor=factor)
        return target_z, *sums.split(1, dim=1)

    def grad_logits(
        self,
        chunks: VocabularyChunks,
        targets: Tensor,
        candidates: KeptTokenSets | None,
        log_normalizer: Tensor,
        entropy: Tensor,
        from_log_prob: Tensor,
        from_entropy: Tensor | None,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        if not _is_plain(chunks, candidates):
            upstream = (from_log_prob, from_entropy)
            yield from super().grad_logits(chunks, targets, candidates, log_normalizer, entropy, *upstream)
            return
        factor = chunks.transform.scale / chunks.transform.temperature
        from_entropy = torch.zeros_like(from_log_prob) if from_entropy is None else from_entropy
        statistics = torch.cat([log_normalizer, entropy, from_log_prob, from_entropy], dim=1)
        for span, weight, logits in chunks.products():
            column = torch.where((targets >= span.start) & (targets < span.stop), targets - span.start, -1)
            vocabulary.log_probs_backward(logits=logits, statistics=statistics, column=column, factor=factor)
            yield span, weight, logits

    def record(self, function: Callable[[], Result], *, watched: bool = True) -> tuple[Result, RecordedKernels | None]:
        return recording.record(function, watched=watched)


def has_onednn_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 numbers natively on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, without gradient."""
    out = torch.empty_like(gate)
    elementwise.silu_mul(gate=gate.flatten(), up=up.flatten(), out=out.flatten())
    return out


def _silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients: with s = sigmoid(gate), d gate = grad * up * s * (1 + gate * (1 - s)) and d up = grad *
    gate * s."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    elementwise.silu_mul_backward(
        gate=gate.flatten(),
        up=up.flatten(),
        grad=grad.contiguous().flatten(),
        grad_gate=grad_gate.flatten(),
        grad_up=grad_up.flatten(),
    )
    return grad_gate, grad_up


class _SiluMul(torch.autograd.Function):
    """Computes silu(gate) * up and saves only `gate` and `up`."""

    @staticmethod
    def forward(ctx: AutogradContext, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _silu_mul_backward(gate, up, grad)


class _SiluMulLinear(torch.autograd.Function):
    """The backward pass of (silu(gate) * up) @ weight.T; the caller fills in the output."""

    @staticmethod
    def forward(ctx: AutogradContext, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return gate.new_empty(*gate.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        *needs_input, needs_weight = ctx.needs_input_grad
        grad_weight = grad.flatten(0, -2).T @ silu_mul(gate, up).flatten(0, -2) if needs_weight else None
        grads = _silu_mul_backward(gate, up, grad @ weight) if any(needs_input) else (None, None)
        return *grads, grad_weight


class _Rotation(torch.autograd.Function):
    """Rotates heads; the gradient is rotated by the opposite angle."""

    @staticmethod
    def forward(ctx: AutogradContext, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotated(heads, cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotated(grad, cosine, sine, -1.0), None, None


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    *rows, count, size = heads.shape
    flat = heads.reshape(-1, count, size)
    if flat.stride()[1:] != (size, 1):
        flat = flat.contiguous()
    cosine, sine = (x.expand(*rows, size).contiguous().view(-1, size) for x in (cosine, sine))
    turned = heads.new_empty(heads.shape)
    elementwise.rotate(x=flat, cosine=cosine, sine=sine, out=turned.view(flat.shape), sign=sign)
    return turned


def _linears_of_few_rows(x: Tensor, layers: Sequence[nn.Linear], epilogue: int, other: Tensor | None) -> Tensor:
    x = x.contiguous()
    widths = [layer.out_features for layer in layers]
    out = x.new_empty(len(x), sum(widths))
    others = [None] * len(layers) if other is None else other.contiguous().split(widths, dim=1)
    for layer, to, operand in zip(layers, out.split(widths, dim=1), others, strict=True):
        tensors = {"x": x, "weight": layer.weight, "bias": layer.bias, "other": operand, "out": to}
        linear_plain.linear_few_rows(**tensors, epilogue=epilogue)
    return out


def _is_plain(chunks: VocabularyChunks, candidates: KeptTokenSets | None) -> bool:
    return candidates is None and chunks.bias is None and chunks.transform.softcap is None
