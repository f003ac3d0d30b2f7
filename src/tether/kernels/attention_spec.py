"""The inputs of attention besides its tensors: a layer's settings, and a layout: which query sees which key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's settings."""

    layer: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window - 1 keys before it
    softcap: float | None = None  # Gemma 2: scores become softcap * tanh(scores / softcap)


class AttentionLayout(Protocol):
    """Knows which query sees which key."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend: query [R, H, Q, D], key and value [R, K, Q, D] of the same tokens -> [R, H, Q, Dv]."""
        ...
