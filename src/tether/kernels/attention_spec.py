"""The inputs of attention besides its tensors: the settings of a layer, and a layout that says which query sees which
key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """Settings of one attention layer."""

    layer: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window - 1 keys before it
    softcap: float | None = None  # Gemma 2: scores become softcap * tanh(scores / softcap)


class AttentionLayout(Protocol):
    """Decides which query sees which key."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with query [R, H, Q, D], key and value [R, K, Q, D] of the same tokens and return [R, H, Q, Dv]."""
        ...
