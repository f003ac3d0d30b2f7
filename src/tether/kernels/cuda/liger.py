"""Liger's Triton kernels for norms and gated MLPs.

Its fused linear cross entropy is not used: it gives no gradient of entropies and knows no replayed truncation, and its
releases up to July 2026 return wrong gradients for losses with different weights for tokens, which every policy loss
has.
"""

from __future__ import annotations

from typing import cast

from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return what `tether.kernels.reference.Reference.rms_norm` does; its two rounding orders are Liger's casting
    modes."""
    mode = "llama" if offset == 0 else "gemma"
    # Not in place: that would write the gradient of x over the incoming one, which a residual may still read.
    return cast("Tensor", liger_rms_norm(x, weight, eps, offset=offset, casting_mode=mode, in_place=False))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; the backward pass overwrites both inputs."""
    return cast("Tensor", liger_swiglu(gate, up))
