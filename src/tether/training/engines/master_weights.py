"""Mixed precision: the model computes in bfloat16, the optimizer updates float32 master weights.

The model's parameters are themselves bfloat16, so no forward casts them and the sampler shares them as they are. Each
gradient is added to the master's float32 gradient the moment it is complete and then freed, so that micro-batches add
up in float32 and never two sets of gradients are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_CACHED = 1 << 18  # numbers


class MasterWeights:
    """The float32 weights of a model that computes in a narrower dtype.

    Args:
        model: in float32; its parameters become `dtype`, but for a critic's head, whose values bfloat16 would round.
        dtype: to compute in.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._stale: set[nn.Parameter] = set()
        head = set() if model.get_output_embeddings() is not None else _outside_backbone(model)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter in model.parameters():
            if id(parameter) in head:
                self._pairs.append((parameter, parameter))
                continue
            master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            parameter.data = master.data.to(dtype)
            self._pairs.append((parameter, master))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_hand_over(master, self._stale))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [master for _, master in self._pairs if master.requires_grad]

    def begin_gradients(self) -> None:
        """A new sum of gradients begins; the memory of the last one is used again, since fresh pages are slow."""
        self._stale.clear()
        for parameter, master in self._pairs:
            if master.grad is not None and parameter is master:
                master.grad.zero_()
            elif master.grad is not None:
                self._stale.add(master)

    def finish_gradients(self) -> None:
        """The sum is complete: a parameter that nothing came from has a gradient of 0."""
        for master in self._stale:
            assert master.grad is not None
            master.grad.zero_()
        self._stale.clear()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the masters into the model, in place; after each optimizer step."""
        for parameter, master in self._pairs:
            if parameter is not master and master.requires_grad:
                parameter.copy_(master)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model holds the masters themselves: to save it."""
        narrow = [parameter.data for parameter, _ in self._pairs]
        for parameter, master in self._pairs:
            parameter.data = master.data
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._pairs, narrow, strict=True):
                parameter.data = data


def _hand_over(master: nn.Parameter, stale: set[nn.Parameter]) -> Callable[[Tensor], None]:
    """A hook that adds a gradient to the master's and frees it; the first of a sum replaces the last sum.

    It must not lead to the parameter that it is a hook of: Python collects no cycle through such a hook, and the
    weights would stay in memory as long as the process.
    """

    def hook(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        elif master in stale:
            stale.remove(master)
            master.grad.copy_(gradient)
        else:
            _add(master.grad, gradient)

    return hook


def _add(total: Tensor, part: Tensor) -> None:
    """Add in place; on a CPU a few rows at a time, where PyTorch first makes a copy of `part` in the wider dtype."""
    if total.device.type != "cpu" or total.numel() <= _CACHED:
        total.add_(part)
        return
    at_once = max(1, _CACHED * len(total) // total.numel())
    for wide, narrow in zip(total.split(at_once), part.split(at_once), strict=True):
        wide.add_(narrow)


def _outside_backbone(model: PreTrainedModel) -> set[int]:
    backbone = {id(p) for p in model.base_model.parameters()}
    return {id(p) for p in model.parameters()} - backbone
