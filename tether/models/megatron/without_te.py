"""Two places where Megatron takes Transformer Engine for installed when it is not."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as latent_attention

HAS_TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None
_ROUTER: ModuleType = moe_utils
_LATENT: ModuleType = latent_attention


def correct() -> None:
    """Tell both that it is not there; without effect where it is."""
    if HAS_TRANSFORMER_ENGINE:
        return
    if not hasattr(_ROUTER, "te_general_gemm"):
        _ROUTER.te_general_gemm = None  # type: ignore[attr-defined]
    _LATENT.HAVE_TE = False  # type: ignore[attr-defined]
