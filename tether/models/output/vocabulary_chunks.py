"""One pass over the vocabulary: the logits of all tokens, a chunk of vocabulary entries at a time.

Legend: N = tokens, E = hidden size, V = vocabulary, C = vocabulary entries a chunk. Only [N, C] logits are ever held,
so memory is O(N * C). Chunks of the vocabulary and not of tokens, because each row of the output matrix then gets its
gradient from one matmul, where token chunks would sum a [V, E] tensor each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """That of `hidden`, or of autocast where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def default_chunk_size(hidden: Tensor) -> int:
    """Chunks of 2M logits stay near the cache of a CPU; a GPU wants fewer, larger kernels."""
    elements = 1 << (21 if hidden.device.type == "cpu" else 26)
    return max(256, elements // max(1, hidden.shape[0]))


@dataclass(frozen=True)
class LogitTransform:
    """From the matmul's output to z."""

    scale: float
    softcap: float | None
    temperature: float

    def apply_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.softcap is not None:
            logits = logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope_beside(self, z: Tensor) -> Tensor | None:
        """dz / dlogits over ``scale / temperature``: with a softcap 1 - tanh^2, else 1 (None)."""
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
        """Yields the chunk's range of the vocabulary, its weight [C, E], z [N, C] and work space [N, C]."""
        for span, weight, raw in self.products():
            z, work = self._shaped(self._z, len(weight)), self._shaped(self._work, len(weight))
            if z.dtype != raw.dtype:
                z.copy_(raw)
            if self.bias is not None:
                z.add_(self.bias[span])
            yield span, weight, self.transform.apply_(z), work

    def products(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields the chunk's range of the vocabulary, its weight [C, E] and their product with `hidden` [N, C]."""
        for start in range(0, len(self.weight), self.size):
            span = slice(start, min(start + self.size, len(self.weight)))
            weight = self.weight[span].to(self.hidden.dtype)
            yield span, weight, torch.mm(self.hidden, weight.T, out=self._shaped(self._raw, len(weight)))

    def for_matmul(self, grad: Tensor) -> Tensor:
        """`grad` [N, C] in the dtype of the matmuls; takes the buffer of raw logits."""
        return grad if grad.dtype == self._raw.dtype else self._shaped(self._raw, grad.shape[1]).copy_(grad)

    def _shaped(self, buffer: Tensor, width: int) -> Tensor:
        return buffer[: len(self.hidden) * width].view(len(self.hidden), width)
