"""The importance ratio, in logarithms."""

from tether.algorithms.masking import select
from tether.algorithms.shapes import Mask, Tokens

MAX_LOG_RATIO = 20.0
"""exp() of it is finite in float32; policies further apart have no meaningful ratio."""


def bounded_log_ratio(log_probs: Tokens, old_log_probs: Tokens, response_mask: Mask) -> Tokens:
    """Return log p - log p_old within +-20; 0 outside the mask."""
    difference = select(log_probs, response_mask) - select(old_log_probs, response_mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
