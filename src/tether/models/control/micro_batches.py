"""The forward pass of a policy over many decisions, and its backward pass, in micro-batches.

Of several micro-batches only the outputs are kept, and the backward pass computes each forward pass again. So what the
losses compute from all outputs (denominators, choices between decisions) does not depend on the size of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tether.models.control.spec import ForwardPass

Forward = Callable[..., tuple[Tensor, Tensor | None]]
"""A micro-batch -> outputs [b, outputs], and values [b, V] where there is a critic."""


def forward_in_micro_batches(forward: Forward, pieces: Iterable[tuple[object, ...]]) -> ForwardPass:
    """The outputs of all micro-batches; a single one keeps its graph for `backward_in_micro_batches`.

    Args:
        forward: the forward pass of one micro-batch.
        pieces: its arguments for each micro-batch.
    """
    pieces = list(pieces)
    with torch.set_grad_enabled(len(pieces) == 1):
        results = [forward(*piece) for piece in pieces]
    outputs = torch.cat([part.detach() for part, _ in results])
    values = [part.detach() for _, part in results if part is not None]
    return ForwardPass(outputs, torch.cat(values) if values else None, (pieces, results))


def backward_in_micro_batches(
    forward: Forward, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None
) -> None:
    """Add the gradient through the outputs and values to that of every parameter.

    Args:
        forward: as it was given to `forward_in_micro_batches`.
        passed: its result.
        outputs_grad: of the loss with respect to the outputs, [B, outputs]; None: there is none.
        values_grad: with respect to the values, [B, V].
    """
    pieces, results = passed.saved
    ends = accumulate((len(outputs) for outputs, _ in results), initial=0)
    for piece, (start, stop), first in zip(pieces, pairwise(ends), results, strict=True):
        with torch.enable_grad():
            outputs, values = first if len(pieces) == 1 else forward(*piece)
        sides = [(outputs, outputs_grad), (values, values_grad)]
        given = [(side, grad[start:stop]) for side, grad in sides if side is not None and grad is not None]
        torch.autograd.backward([side for side, _ in given], [grad for _, grad in given])
