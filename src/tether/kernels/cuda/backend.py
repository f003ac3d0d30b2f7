"""The operations with a CUDA kernel in Liger or flash-attn, where these packages are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

from torch import Tensor, nn

from tether.kernels.causal_attention import AttentionSpec
from tether.kernels.cuda import graph
from tether.kernels.reference import RecordedKernels, Reference

Result = TypeVar("Result")


class Cuda(Reference):
    """Liger's norms and gated MLPs, flash-attn's packed attention; PyTorch where they are not installed."""

    name = "cuda"
    captures = True

    def describe(self) -> str:
        norms = "Liger" if self._liger else "PyTorch (pip install liger-kernel for fused ones)"
        attention = "flash-attn" if self._flash else "PyTorch, padded (pip install flash-attn for packed)"
        return f"norms and gated MLPs: {norms}; packed attention: {attention}"

    @cached_property
    def _liger(self) -> ModuleType | None:
        return import_module("tether.kernels.cuda.liger") if find_spec("liger_kernel") else None

    @cached_property
    def _flash(self) -> ModuleType | None:
        return import_module("tether.kernels.cuda.flash_attention") if find_spec("flash_attn") else None

    def capture(self, function: Callable[[], Result]) -> tuple[Result, RecordedKernels]:
        return graph.capture(function)

    def rows_at_once(self, active: int, max_rows: int) -> int:
        # A graph is recorded for one number of rows: round up to a multiple of 8, or of an eighth to a quarter of them.
        step = max(8, 1 << max(0, active.bit_length() - 3))
        return min(max_rows, -(-active // step) * step)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        if self._liger is None:
            return super().rms_norm(x, weight, eps, offset)
        normed: Tensor = self._liger.rms_norm(x, weight, eps, offset)
        return normed

    def gated_mlp(self, gate: Tensor, up: Tensor, down: nn.Module) -> Tensor:
        if self._liger is None:
            return super().gated_mlp(gate, up, down)
        out: Tensor = down(self._liger.silu_mul(gate, up))
        return out

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        prefixes: tuple[int | None, ...] | None,
        spec: AttentionSpec,
    ) -> Tensor:
        if self._flash is None or not self._flash.can_attend(query, value):
            return super().packed_attention(query, key, value, lengths, prefixes, spec)
        attended: Tensor = self._flash.attention(query, key, value, lengths, prefixes, spec)
        return attended
