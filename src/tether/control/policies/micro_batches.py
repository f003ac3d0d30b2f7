"""Forward and backward passes of a policy over many decisions, in micro-batches.

With several micro-batches, only the outputs are stored, and the backward pass repeats each forward pass. The loss is
computed from all outputs, so its denominators and selections of decisions do not depend on the micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tether.control.policies.spec import ForwardPass

Forward = Callable[..., tuple[Tensor, Tensor | None]]
"""Maps the arguments of a micro-batch to outputs [b, outputs], and values [b, V] if there is a critic."""


def forward_in_micro_batches(forward: Forward, micro_batches: Iterable[tuple[object, ...]]) -> ForwardPass:
    """Return the outputs of all micro-batches; a single micro-batch keeps its graph for `backward_in_micro_batches`."""
    batches = list(micro_batches)
    with torch.set_grad_enabled(len(batches) == 1):
        results = [forward(*batch) for batch in batches]
    outputs = torch.cat([output.detach() for output, _ in results])
    values = [value.detach() for _, value in results if value is not None]
    return ForwardPass(outputs, torch.cat(values) if values else None, (batches, results))


def backward_in_micro_batches(
    forward: Forward, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None
) -> None:
    """Add the gradient of the loss, given that of outputs and values, to the ``grad`` of every parameter.

    Args:
        forward: the argument of `forward_in_micro_batches`.
        passed: its result.
        outputs_grad: gradient of the loss with respect to the outputs, [B, outputs]; None: no gradient.
        values_grad: gradient with respect to the values, [B, V].
    """
    batches, results = passed.saved
    ends = accumulate((len(outputs) for outputs, _ in results), initial=0)
    for batch, (start, stop), first in zip(batches, pairwise(ends), results, strict=True):
        with torch.enable_grad():
            outputs, values = first if len(batches) == 1 else forward(*batch)
        pairs = [(outputs, outputs_grad), (values, values_grad)]
        with_grad = [(x, grad[start:stop]) for x, grad in pairs if x is not None and grad is not None]
        torch.autograd.backward([x for x, _ in with_grad], [grad for _, grad in with_grad])
