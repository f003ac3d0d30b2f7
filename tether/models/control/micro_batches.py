"""What a policy says of many decisions, and the way back through it, in micro-batches.

Only what is said is kept of several micro-batches, and the way back passes forward again. So what the losses make of
all of it (denominators, choices between decisions) does not depend on the size of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tether.models.control.spec import Passed

Say = Callable[..., tuple[Tensor, Tensor | None]]
"""A micro-batch -> outputs [b, outputs], and values [b, V] where there is a critic."""


def pass_in_parts(say: Say, pieces: Iterable[tuple[object, ...]]) -> Passed:
    """Say something of every micro-batch; a single one keeps its graph for `back_in_parts`.

    Args:
        say: see there.
        pieces: its arguments, for each micro-batch.
    """
    pieces = list(pieces)
    with torch.set_grad_enabled(len(pieces) == 1):
        said = [say(*piece) for piece in pieces]
    outputs = torch.cat([part.detach() for part, _ in said])
    values = [part.detach() for _, part in said if part is not None]
    return Passed(outputs, torch.cat(values) if values else None, (pieces, said))


def back_in_parts(say: Say, passed: Passed, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
    """Add the gradient of what was said to that of every parameter.

    Args:
        say: as it was given to `pass_in_parts`.
        passed: what that gave.
        outputs_grad: of the loss by the outputs, [B, outputs]; None: there is none.
        values_grad: by the values, [B, V].
    """
    pieces, said = passed.saved
    ends = accumulate((len(outputs) for outputs, _ in said), initial=0)
    for piece, (start, stop), first in zip(pieces, pairwise(ends), said, strict=True):
        with torch.enable_grad():
            outputs, values = first if len(pieces) == 1 else say(*piece)
        sides = [(outputs, outputs_grad), (values, values_grad)]
        given = [(side, grad[start:stop]) for side, grad in sides if side is not None and grad is not None]
        torch.autograd.backward([side for side, _ in given], [grad for _, grad in given])
