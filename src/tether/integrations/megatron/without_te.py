"""Fixes for three places where Megatron wrongly assumes that Transformer Engine is installed."""

from __future__ import annotations

from functools import wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import megatron.core.tensor_parallel.random as recomputation
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as latent_attention

HAS_TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None
_ROUTER: ModuleType = moe_utils
_LATENT: ModuleType = latent_attention
_corrected: list[type] = []


def correct() -> None:
    """Apply the fixes, unless Transformer Engine is installed."""
    if HAS_TRANSFORMER_ENGINE:
        return
    if not hasattr(_ROUTER, "te_general_gemm"):
        _ROUTER.te_general_gemm = None  # type: ignore[attr-defined]
    _LATENT.HAVE_TE = False  # type: ignore[attr-defined]
    kind = recomputation.CheckpointWithoutOutput  # recomputes norms and activations (recompute_modules)
    if kind not in _corrected:
        kind.__init__ = _without_float8(kind.__init__)
        _corrected.append(kind)


def _without_float8(init: Any) -> Any:
    """Wrap an ``__init__`` so that it sets ``fp8`` to False.

    Megatron sets it by comparing a flag, which is False, with None, and would then request state from Transformer
    Engine.
    """

    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.fp8 = False

    return wrapped
