"""Statistics over the positions where a mask is true.

Every function masks values before it reduces them, so that a NaN or a huge value at a masked position affects neither
the result nor a gradient. Results are computed in float32 or better; float64 stays float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from tether.algorithms.shapes import Mask, Rows, Tokens


class ValidCounts(NamedTuple):
    """The denominators of `aggregate_loss`, to be summed over ranks before any division."""

    num_tokens: Int[Tensor, ""]
    num_sequences: Int[Tensor, ""]


def count_valid(response_mask: Mask) -> ValidCounts:
    """Return the number of valid tokens, and the number of rows with at least one valid token."""
    mask = response_mask.bool()
    return ValidCounts(mask.sum(), mask.any(dim=-1).sum())


def widen(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values in float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def select(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values where the mask is true and exactly 0 elsewhere, in float32 or better."""
    return torch.where(mask.bool(), widen(values), 0.0)


def largest(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the maximum over the mask; -inf if the mask is empty."""
    masked = torch.where(mask.bool(), values, -torch.inf)
    return masked.amax() if masked.numel() else masked.new_tensor(-torch.inf)


def spread(per_row: Rows, mask: Mask) -> Tokens:
    """Repeat each row's value at its valid tokens; 0 elsewhere."""
    return select(per_row[:, None].expand(mask.shape), mask)


def clip(values: Tensor, lowest: Tensor | float, highest: Tensor | float) -> Tensor:
    """Return the values limited to the bounds; the gradient is 1 between the bounds, both included, and 0 outside."""
    # Versions of torch differ in the gradient of `torch.clamp` at a bound, which matters because with a clip of 0 the
    # ratio is at the bound.
    lowest, highest = (torch.as_tensor(bound, dtype=values.dtype, device=values.device) for bound in (lowest, highest))
    inside = (values >= lowest) & (values <= highest)
    return torch.where(inside, values, values.detach().clamp(lowest, highest))


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Return the sum over the mask, over all dimensions or one; 0 if the mask is empty."""
    return select(values, mask).sum(dim=dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Return the mean over the mask, over all dimensions or one; 0 if the mask is empty."""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim=dim).clamp(min=1)


def masked_centre(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Subtract the mean over the mask; 0 outside it, and exactly 0 everywhere if all valid values are equal."""
    valid = select(values, mask)
    # Values are shifted by the maximum first, so that equal values have no rounding error that whitening could amplify.
    shifted = select(valid - largest(valid, mask), mask)
    return select(shifted - masked_mean(shifted, mask), mask)


def masked_var(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the unbiased variance over the mask, computed in two passes; 0 for fewer than two values."""
    return masked_centre(values, mask).square().sum() / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Normalise the valid values to mean 0 and unbiased variance 1: (x - mean) / sqrt(var + 1e-8); 0 outside the mask.

    A single valid value, or several equal ones, give 0. The result has no gradient.
    """
    centred = masked_centre(values.detach(), mask)
    return centred * torch.rsqrt(masked_var(centred, mask) + 1e-8)
