"""Shapes of the tensors in this package.

Legend: B = rows (one response or one episode each), T = response positions, V = vocabulary, R = reward components.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float, Int, Shaped
from torch import Tensor

Tokens = Float[Tensor, "B T"]
"""One number for each response position."""
Mask = Shaped[Tensor, "B T"]
"""True (or non-zero, in any dtype) for tokens that the policy sampled."""
Rows = Float[Tensor, " B"]
"""One number for each row."""
RowIds = Int[Tensor, " B"]
"""One integer for each row."""
GroupIds = RowIds | Shaped[np.ndarray, " B"] | Sequence[Hashable]
"""The group of each row: integers, or a list or an array of anything hashable."""
Scalar = Float[Tensor, ""]
