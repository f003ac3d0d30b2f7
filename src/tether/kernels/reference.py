"""Every operation of the models in plain PyTorch, for any device and dtype; other backends are tested against it.

A backend is a class with these methods. `tether.kernels.cpu.backend` and `tether.kernels.cuda.backend` override those
for which they have a kernel, and fall back to this class for the others and for shapes that a kernel does not support.
Results are differentiable where a gradient is needed.

Legend: N = tokens or rows, H = query heads, K = key/value heads, D and E = head size of keys and of values, V =
vocabulary.

Sampling inverts the cumulative sums of a distribution over the vocabulary. Nothing of the vocabulary's size is sorted
or accumulated: each row is summed in blocks, and the block that contains the drawn number is located first, the token
in it second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tether.kernels.causal_attention import (
    AttentionSpec,
    causal_attention,
    masked_attention,
    padded_batches,
    visible_keys,
    weights_backward,
)
from tether.kernels.vocabulary_chunks import KeptTokenSets, VocabularyChunks, grad_logits, log_sums
from tether.types import AutogradContext

FEW_ROWS = 2
"""Number of rows up to which a kernel may compute a linear layer without packed weights."""


class Epilogue(Enum):
    """Applied to the outputs of a linear layer before they are rounded; the last two need a second tensor."""

    NONE = "none"
    SILU = "silu"
    TIMES = "times"
    PLUS = "plus"


@dataclass(frozen=True)
class PackedLinears:
    """Layers that read the same input, as one: weights in the backend's own order, and biases."""

    weight: Tensor
    bias: Tensor | None


def apply_epilogue(product: Tensor, epilogue: Epilogue, other: Tensor | None) -> Tensor:
    """Apply an epilogue to [N, O] with `other` [N, O]; in place, except SiLU."""
    if other is None:
        return F.silu(product) if epilogue is Epilogue.SILU else product
    return product.mul_(other) if epilogue is Epilogue.TIMES else product.add_(other)


BLOCK = 128
"""Vocabulary entries per sum."""


def rows_in_scratch(logits: Tensor) -> int:
    """Return the number of rows of logits [R, V] whose fp32 weights are in memory at once.

    They take 8 MiB on a CPU, about the size of a cache, and 1 GiB where each operation is a kernel launch.
    """
    return max(1, (1 << (21 if logits.device.type == "cpu" else 28)) // logits.shape[-1])


def inverse_sample(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token [R] at which the cumulative weights [R, V] exceed `uniform` [R] of their total, and its
    log-probability [R]."""
    token, total = _invert(weights, uniform)
    chosen = weights.gather(-1, token[:, None]).squeeze(-1)
    return token, chosen.log() - total.log().to(chosen.dtype)


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token [R] at which `uniform` of each row's total is exceeded, and the total [R] in the dtype of
    `uniform`."""
    missing = -weights.shape[-1] % BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, BLOCK)
    mass = blocks.sum(dim=-1).to(uniform.dtype).cumsum(dim=-1)
    total = mass[:, -1]
    block, before = first_above(mass, uniform * total)
    inside = blocks[torch.arange(len(weights), device=weights.device), block].to(uniform.dtype).cumsum(dim=-1)
    token, _ = first_above(inside, uniform * total - before)
    return block * BLOCK + token, total


def first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first entry of each row that exceeds the target, and the entry before it (0 at the
    start).

    The target is clamped strictly below the row's last entry: rounding may lift it there, and an entry without
    probability must never be drawn.
    """
    last = cumulative[:, -1]
    target = torch.minimum(target, last * (1 - torch.finfo(last.dtype).eps)).clamp(min=0)
    index = (cumulative <= target[:, None]).sum(dim=-1).clamp(max=cumulative.shape[-1] - 1)  # NaN rows stay in range
    before = cumulative.gather(-1, (index - 1).clamp(min=0)[:, None]).squeeze(-1)
    return index, torch.where(index > 0, before, 0.0)


Result = TypeVar("Result")
_CACHED = 1 << 17  # numbers processed at a time


class RecordedKernels(Protocol):
    """The kernels of one call, which can run again."""

    def run(self) -> None:
        """Run the kernels again on the same memory."""
        ...


class Reference:
    """The operations in plain PyTorch."""

    name = "reference"
    captures = False
    """Whether `capture` records calls."""

    def describe(self) -> str:
        """Describe in words which kernels are used, for the log."""
        return "plain PyTorch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension, in at least float32: [..,
        E].

        At an offset of 0 the normalised x is rounded to its dtype before the weight, as transformers does, else after.
        """
        if not torch.is_grad_enabled():
            return self.rms_norm_forward(x, weight, eps, offset)[0]
        normed: Tensor = _RMSNorm.apply(x, weight, eps, offset, self)
        return normed

    def rms_norm_forward(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """Return the normalised x [.., E] and the factor 1 / sqrt(mean(x^2) + eps) of each row [.., 1]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        # A few rows at a time, so that intermediate results stay in the cache.
        for rows, row_scale, normed in _few_rows(x, scale, out):
            exact = rows.to(scale.dtype)
            mean_square = torch.linalg.vecdot(exact, exact).div_(x.shape[-1])
            row_scale.copy_(mean_square.add_(eps).rsqrt_().unsqueeze(-1))
            if offset == 0:
                torch.mul(torch.mul(exact, row_scale).to(x.dtype), weight, out=normed)
            else:
                normed.copy_((exact * row_scale).mul_(weight.to(exact.dtype) + offset))
        return out, scale

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor, offset: float, needs_weight: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and of the weight, the latter in float32, and None unless it is needed.

        With n = x * scale: d weight = sum grad n, dx = scale (g - n mean(g n)) for g = grad * (weight + offset).
        """
        grad_x, grad_weight = torch.empty_like(x), scale.new_zeros(weight.shape)
        factor = weight.to(scale.dtype) + offset
        for rows, row_scale, row_grad, row_grad_x in _few_rows(x, scale, grad, grad_x):
            normed = rows.to(scale.dtype) * row_scale
            exact = row_grad.to(scale.dtype)
            if needs_weight:
                grad_weight += torch.mul(exact, normed).sum(0)
            g = exact * factor
            along = torch.linalg.vecdot(g, normed).div_(-x.shape[-1]).unsqueeze(-1)
            row_grad_x.copy_(g.addcmul_(normed, along).mul_(row_scale))
        return grad_x, grad_weight if needs_weight else None

    def gated_mlp(self, gate: Tensor, up: Tensor, down: nn.Module) -> Tensor:
        """Return ``down(silu(gate) * up)`` of gate and up [.., E]."""
        out: Tensor = down(F.silu(gate) * up)
        return out

    def rotate(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return heads [.., H, D] rotated by angles with this cosine and sine [.., D], which repeat for both halves of
        D.

        With x and y the two halves: ``x cos - y sin, y cos + x sin`` (Su et al., "RoFormer", 2021, in the order of
        halves).
        """
        half = heads.shape[-1] // 2
        first, second = heads.split(half, dim=-1)
        cosine, sine = (x[..., None, :half] for x in (cosine, sine))
        turned_first = torch.addcmul(first * cosine, second, sine, value=-1)
        return torch.cat([turned_first, torch.addcmul(second * cosine, first, sine)], dim=-1)

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        prefixes: tuple[int | None, ...] | None,
        spec: AttentionSpec,
    ) -> Tensor:
        """Return causal attention of packed segments: query [N, H, D], key [N, K, D], value [N, K, E] -> [N, H, E].

        `lengths` and `prefixes` are those of `tether.text.models.layers.Packed`.
        """
        batches = padded_batches(lengths, prefixes, query.device)
        spread = (batches.batches(batches.spread(x)) for x in (query, key, value))
        outputs = []
        for q, k, v in zip(*spread, strict=True):
            out = self.causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return batches.collect(torch.cat(outputs))

    def causal_attention(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return causal attention of each row: query [R, H, Q, D], key [R, K, Q, D], value [R, K, Q, E] -> [R, H, Q,
        E]."""
        length = query.shape[2]
        windowed = spec.sliding_window is not None and spec.sliding_window < length
        if not windowed and spec.softcap is None:
            # PyTorch's kernel requires keys and values of one head size.
            if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
                return causal_attention(query, key, value, spec.scale, self.attention_weights_backward)
            gqa = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=spec.scale, enable_gqa=gqa)
        position = torch.arange(length, device=query.device)
        visible = visible_keys(position, position, spec)
        return masked_attention(query, key, value, visible, spec)

    def attention_weights_backward(
        self, scores: Tensor, grad_weights: Tensor, log_sum: Tensor, out: Tensor, grad: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return what `tether.kernels.causal_attention.weights_backward` does."""
        return weights_backward(scores, grad_weights, log_sum, out, grad, scale)

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
        """Attend with one new token per row: write its key and value to the cache, then attend over the keys that it
        sees.

        Args:
            query: [R, H, D].
            key: [R, K, D].
            value: [R, K, E].
            keys: [S, K, C, D], of which the first R slots are used.
            values: [S, K, C, E].
            position: [R] int64 position of the new token, all below `length`.
            length: number of cached positions that are read.
            spec: settings of the layer.
            biases: masks that layers with the same window share during a step; empty at its start.

        Returns:
            [R, H, 1, E].
        """
        rows, heads, size = query.shape
        row = torch.arange(rows, device=position.device)
        keys[row, :, position], values[row, :, position] = key, value
        keys, values = keys[:rows, :, :length], values[:rows, :, :length]
        if spec.sliding_window not in biases:
            visible = visible_keys(position[:, None, None], torch.arange(length, device=position.device), spec)
            bias = torch.zeros(visible.shape, dtype=query.dtype, device=visible.device)
            biases[spec.sliding_window] = bias.masked_fill_(~visible, -torch.inf)
        bias = biases[spec.sliding_window]
        # The G query heads of one key head take the place of G query positions, so that keys are never repeated.
        query = query.reshape(rows, keys.shape[1], -1, size)
        if spec.softcap is None:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=spec.scale)
        else:
            scores = torch.matmul(query, keys.transpose(-1, -2)) * spec.scale
            scores = spec.softcap * torch.tanh(scores / spec.softcap) + bias
            weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
            out = torch.matmul(weights.to(values.dtype), values)
        return out.reshape(rows, heads, 1, -1)

    def continued_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Attend with several new tokens per row over keys in the cache, which include their own; no gradient.

        Args:
            query: [R, H, Q, D].
            keys: [R, K, L, D]; key p is at position p.
            values: [R, K, L, E].
            position: [R, Q] int64 positions of the new tokens, all below L.
            spec: settings of the layer.

        Returns:
            [R, H, Q, E].
        """
        visible = visible_keys(position, torch.arange(keys.shape[2], device=position.device), spec)
        return masked_attention(query, keys, values, visible[:, None, None], spec)

    def pack_linears(self, layers: Sequence[nn.Linear]) -> PackedLinears | None:
        """Return a copy of the layers' weights in the order that `linears` needs; None if it uses them unchanged."""
        return None

    def linears(
        self,
        x: Tensor,
        layers: Sequence[nn.Linear],
        packed: PackedLinears | None,
        epilogue: Epilogue,
        other: Tensor | None,
    ) -> Tensor:
        """Return the concatenated outputs of layers that read the same x [N, E], after the epilogue; no gradient.

        Args:
            x: [N, E].
            layers: the layers, with their current weights.
            packed: result of `pack_linears`.
            epilogue: applied before the result is rounded.
            other: [N, sum of the layers' widths], for the epilogues with a second tensor.
        """
        outputs = [F.linear(x, layer.weight, layer.bias) for layer in layers]
        return apply_epilogue(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1), epilogue, other)

    def sample(self, logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the token [R] at which the cumulative distribution of logits [R, V] exceeds `uniform` [R], and its
        log-probability."""
        at_once = rows_in_scratch(logits)
        shards = zip(logits.split(at_once), uniform.split(at_once), strict=True)
        drawn = []
        for rows, numbers in shards:
            exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
            weights = (exact if temperature == 1 else exact / temperature).softmax(dim=-1)
            drawn.append(inverse_sample(weights, numbers))
        token, log_prob = map(torch.cat, zip(*drawn, strict=True))
        return token, log_prob

    def log_sums(
        self,
        chunks: VocabularyChunks,
        targets: Tensor,
        candidates: KeptTokenSets | None,
        with_entropy: bool,
        with_sum_pi_squared: bool,
    ) -> tuple[Tensor, ...]:
        """Return what `tether.kernels.vocabulary_chunks.log_sums` does."""
        return log_sums(chunks, targets, candidates, with_entropy, with_sum_pi_squared)

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
        """Return what `tether.kernels.vocabulary_chunks.grad_logits` does."""
        return grad_logits(chunks, targets, candidates, log_normalizer, entropy, from_log_prob, from_entropy)

    def capture(self, function: Callable[[], Result]) -> tuple[Result, RecordedKernels]:
        """Record what a call makes the device do; running the recording writes the result to the returned location.

        Only for backends that set `captures`; the call must neither wait for the device nor read from it.
        """
        raise TypeError(f"{self.name} kernels record no calls")

    def rows_at_once(self, active: int, max_rows: int) -> int:
        """Return the number of rows to decode, up to `max_rows`: the active ones, or more where a recording needs a
        fixed number."""
        return active

    def record(self, function: Callable[[], Result], *, watched: bool = True) -> tuple[Result, RecordedKernels | None]:
        """Call a function and return its result, with a recording where its kernels can run again.

        `watched` also detects computation outside of these kernels; the recording is then None.
        """
        return function(), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float, offset: float, backend: Reference
    ) -> Tensor:
        x = x.contiguous()
        out, scale = backend.rms_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset, ctx.backend = offset, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        grads = ctx.backend.rms_norm_backward(x, weight, scale, grad.contiguous(), ctx.offset, needs_weight)
        grad_x, grad_weight = grads
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _few_rows(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of each tensor [.., width], a few at a time on a CPU and all at once elsewhere."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, *others)]
    at_once = max(1, _CACHED // x.shape[-1]) if x.device.type == "cpu" else max(1, len(flat[0]))
    return zip(*(rows.split(at_once) for rows in flat), strict=True)
