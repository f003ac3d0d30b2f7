"""Passes over the vocabulary: the logits of all tokens for one chunk of vocabulary entries at a time, and sums over
them.

Legend: N = tokens, E = hidden size, V = vocabulary, C = vocabulary entries in a chunk. Only [N, C] logits exist at a
time, so memory is O(N * C). The vocabulary is split rather than the tokens, because each row of the output matrix then
gets its gradient from one matmul, where chunks of tokens would sum a [V, E] tensor each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

CUT = -1e30
"""z of a token that sampling excluded: its exp is 0, and unlike -inf it stays finite in products with 0."""


class KeptTokenSets(Protocol):
    """The tokens that each of N positions could be sampled from."""

    def cut(self, span: slice) -> Tensor:
        """Return [N, C] bool: the tokens of this range of the vocabulary that could not be sampled."""
        ...


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of `hidden`, or that of autocast where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def default_chunk_size(hidden: Tensor) -> int:
    """Return a chunk size of 2M logits on a CPU, about the size of its cache; a GPU is faster with fewer, larger
    kernels."""
    elements = 1 << (21 if hidden.device.type == "cpu" else 26)
    return max(256, elements // max(1, hidden.shape[0]))


@dataclass(frozen=True)
class LogitTransform:
    """The transformation from the matmul's output to z."""

    scale: float
    softcap: float | None
    temperature: float

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply the transformation in place."""
        if self.softcap is not None:
            logits = logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def softcap_slope(self, z: Tensor) -> Tensor | None:
        """Return dz / dlogits divided by ``scale / temperature``: 1 - tanh^2 with a softcap, else None, which stands
        for 1."""
        if self.softcap is None:
            return None
        return 1.0 - (z * (self.temperature / self.softcap)).square_()


class VocabularyChunks:
    """One pass over the vocabulary. Its buffers are allocated once: fresh pages would cost more than the arithmetic."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform, size: int
    ) -> None:
        self.hidden, self.weight, self.bias, self.transform, self.size = hidden, weight, bias, transform, size
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._raw = hidden.new_empty(len(hidden) * min(size, len(weight)))

    @cached_property
    def _z(self) -> Tensor:
        return self._raw if self._raw.dtype == self.dtype else torch.empty_like(self._raw, dtype=self.dtype)

    @cached_property
    def _work(self) -> Tensor:
        return torch.empty_like(self._z)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the chunk's range of the vocabulary, its weight [C, E], z [N, C] and work space [N, C]."""
        for span, weight, raw in self.products():
            z, work = self._shaped(self._z, len(weight)), self._shaped(self._work, len(weight))
            if z.dtype != raw.dtype:
                z.copy_(raw)
            if self.bias is not None:
                z.add_(self.bias[span])
            yield span, weight, self.transform.apply_(z), work

    def products(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the chunk's range of the vocabulary, its weight [C, E] and their product with `hidden` [N, C]."""
        for start in range(0, len(self.weight), self.size):
            span = slice(start, min(start + self.size, len(self.weight)))
            weight = self.weight[span].to(self.hidden.dtype)
            yield span, weight, torch.mm(self.hidden, weight.T, out=self._shaped(self._raw, len(weight)))

    def for_matmul(self, grad: Tensor) -> Tensor:
        """Return `grad` [N, C] in the dtype of the matmuls, reusing the buffer of raw logits."""
        return grad if grad.dtype == self._raw.dtype else self._shaped(self._raw, grad.shape[1]).copy_(grad)

    def _shaped(self, buffer: Tensor, width: int) -> Tensor:
        return buffer[: len(self.hidden) * width].view(len(self.hidden), width)


def locate(targets: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Return which targets [N, 1] lie in a chunk, and their column there (0 for the others)."""
    inside = (targets >= span.start) & (targets < span.stop)
    return inside[:, None], torch.where(inside, targets - span.start, 0)[:, None]


def log_sums(
    chunks: VocabularyChunks,
    targets: Tensor,
    candidates: KeptTokenSets | None,
    with_entropy: bool,
    with_sum_pi_squared: bool,
) -> tuple[Tensor, ...]:
    """Return [N, 1] each: z of the target, and with m = max z: m, sum e^(z-m), sum e^(z-m) (z-m), sum e^2(z-m)."""
    target_z = torch.zeros(len(targets), 1, dtype=chunks.dtype, device=targets.device)
    mass, moment, square = (torch.zeros_like(target_z) for _ in range(3))
    top = torch.full_like(target_z, torch.finfo(chunks.dtype).min)
    for span, _, z, exp_z in chunks:
        if candidates is not None:
            z.masked_fill_(candidates.cut(span), CUT)
        inside, column = locate(targets, span)
        target_z = torch.where(inside, z.gather(1, column), target_z)
        new_top = torch.maximum(top, z.amax(1, keepdim=True))
        torch.exp(z.sub_(new_top), out=exp_z)
        shift = top - new_top
        decay = shift.exp()  # factor that scales the sums so far to the new maximum
        if with_entropy:
            moment = decay * (moment + shift * mass) + torch.linalg.vecdot(exp_z, z)[:, None]
        if with_sum_pi_squared:
            square = decay.square() * square + torch.linalg.vecdot(exp_z, exp_z)[:, None]
        mass = decay * mass + exp_z.sum(1, keepdim=True)
        top = new_top
    return target_z, top, mass, moment, square


def grad_logits(
    chunks: VocabularyChunks,
    targets: Tensor,
    candidates: KeptTokenSets | None,
    log_normalizer: Tensor,
    entropy: Tensor,
    from_log_prob: Tensor,
    from_entropy: Tensor | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each chunk's span, its weight and the gradient of its logits [N, C].

    dz = g (1[v = y] - p) - h p (log p + entropy) for upstream gradients g of the log-prob, h of the entropy.
    """
    for span, weight, z, p in chunks:
        softcap_slope = chunks.transform.softcap_slope(z)
        if candidates is not None:
            z.masked_fill_(candidates.cut(span), CUT)
        torch.exp(z.sub_(log_normalizer), out=p)
        if from_entropy is None:
            grad = p.mul_(-from_log_prob)
        else:
            grad = z.add_(entropy).mul_(from_entropy).add_(from_log_prob).mul_(p).neg_()
        inside, column = locate(targets, span)
        grad.scatter_add_(1, column, torch.where(inside, from_log_prob, 0.0))
        yield span, weight, grad if softcap_slope is None else grad.mul_(softcap_slope)
