"""Statistics over the positions where a mask is true.

Every function selects first and reduces afterwards: a NaN or a 1e9 at a masked position reaches neither the result nor
a gradient. Work is done in float32 or better; float64 stays float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from tether.algorithms.shapes import Mask, Rows, Tokens


class ValidCounts(NamedTuple):
    """The denominators of `aggregate_loss`; sum them over ranks before any division."""

    num_tokens: Int[Tensor, ""]
    num_sequences: Int[Tensor, ""]


def count_valid(response_mask: Mask) -> ValidCounts:
    """Count the tokens of the mask and its rows with at least one token."""
    mask = response_mask.bool()
    return ValidCounts(mask.sum(), mask.any(dim=-1).sum())


def widen(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values in float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def select(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Keep the values where the mask is true, with exactly 0 elsewhere, in float32 or better."""
    return torch.where(mask.bool(), widen(values), 0.0)


def largest(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Maximum over the mask; that of nothing is -inf."""
    kept = torch.where(mask.bool(), values, -torch.inf)
    return kept.amax() if kept.numel() else kept.new_tensor(-torch.inf)


def spread(per_row: Rows, mask: Mask) -> Tokens:
    """Give every valid token of a row the number of the row; 0 to the others."""
    return select(per_row[:, None].expand(mask.shape), mask)


def clip(values: Tensor, lowest: Tensor | float, highest: Tensor | float) -> Tensor:
    """Return the values limited to the bounds; the gradient is 1 from bound to bound, both included, and 0 outside.

    Versions of torch disagree about the gradient of `torch.clamp` at a bound, where the ratio of a clip of 0 is.
    """
    lowest, highest = (torch.as_tensor(bound, dtype=values.dtype, device=values.device) for bound in (lowest, highest))
    inside = (values >= lowest) & (values <= highest)
    return torch.where(inside, values, values.detach().clamp(lowest, highest))


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum over the mask, over all dimensions or one; the sum of nothing is 0."""
    return select(values, mask).sum(dim=dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Mean over the mask, over all dimensions or one; the mean of nothing is 0."""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim=dim).clamp(min=1)


def masked_centre(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Subtract the mean over the mask; 0 outside it, and exactly 0 everywhere if all valid values are equal."""
    kept = select(values, mask)
    # Relative to one of the values, equal values have no rounding error left that whitening could blow up.
    shifted = select(kept - largest(kept, mask), mask)
    return select(shifted - masked_mean(shifted, mask), mask)


def masked_var(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Unbiased variance over the mask, in two passes; 0 for fewer than two values."""
    return masked_centre(values, mask).square().sum() / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Bring the valid values to mean 0 and unbiased variance 1: (x - mean) / sqrt(var + 1e-8); 0 outside the mask.

    No valid value gives all zeros, and one valid value, or several equal ones, give 0. The result has no gradient.
    """
    centred = masked_centre(values.detach(), mask)
    return centred * torch.rsqrt(masked_var(centred, mask) + 1e-8)
