"""The result of an advantage estimator."""

from dataclasses import dataclass

from tether.algorithms.masking import spread
from tether.algorithms.shapes import Mask, Rows, Tokens


@dataclass(frozen=True)
class Advantages:
    """The weight of each token in the policy loss, and the target of the critic, both 0 outside the mask."""

    advantages: Tokens
    returns: Tokens


def outcome(per_row: Rows, response_mask: Mask) -> Advantages:
    """Return advantages that are equal for all tokens of a row; without a critic, the returns are the advantages."""
    tokens = spread(per_row, response_mask)
    return Advantages(tokens, tokens)
