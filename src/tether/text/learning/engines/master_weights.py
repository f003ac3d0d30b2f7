"""Mixed precision: the model computes in bfloat16, the optimizer updates float32 master weights.

The model's parameters are bfloat16 themselves, so no forward pass casts them and the sampler can share them. Each
gradient is added to the master's float32 gradient as soon as it is complete and then freed, so that micro-batches
accumulate in float32 and there is only one set of gradients in memory. Frozen weights, as under LoRA, have no master,
because nothing uses them at a higher precision than bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_CACHED = 1 << 18  # elements that fit into a CPU's cache


class MasterWeights:
    """The float32 weights of a model that computes in a narrower dtype.

    Args:
        model: a float32 model; its parameters become `dtype`, except the head of a critic, because bfloat16 would round
            its values.
        dtype: the dtype to compute in.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._stale: set[nn.Parameter] = set()
        head = set() if model.get_output_embeddings() is not None else _outside_backbone(model)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter in model.parameters():
            if id(parameter) in head:
                self._pairs.append((parameter, parameter))
                continue
            master = nn.Parameter(parameter.data) if parameter.requires_grad else parameter
            parameter.data = parameter.data.to(dtype)
            self._pairs.append((parameter, master))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_accumulate_hook(master, self._stale))

    def parameters(self) -> list[nn.Parameter]:
        return [master for _, master in self._pairs if master.requires_grad]

    def begin_gradients(self) -> None:
        """Start to accumulate gradients, in the memory of the previous ones, since allocating fresh memory is slow."""
        self._stale.clear()
        for parameter, master in self._pairs:
            if master.grad is not None and parameter is master:
                master.grad.zero_()
            elif master.grad is not None:
                self._stale.add(master)

    def finish_gradients(self) -> None:
        """Complete the accumulated gradients: zero those that no backward pass has written."""
        for master in self._stale:
            assert master.grad is not None
            master.grad.zero_()
        self._stale.clear()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the masters to the model in place, rounded, after an optimizer step."""
        for parameter, master in self._pairs:
            if parameter is not master:
                parameter.copy_(master)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context, replace the model's parameters by the masters, and frozen weights by float32 copies, to
        save the model."""
        narrow = [parameter.data for parameter, _ in self._pairs]
        for parameter, master in self._pairs:
            parameter.data = master.data.float()
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._pairs, narrow, strict=True):
                parameter.data = data


def _accumulate_hook(master: nn.Parameter, stale: set[nn.Parameter]) -> Callable[[Tensor], None]:
    """Return a hook that adds a gradient to the master's and frees it; the first gradient overwrites a stale one of the
    master.

    It must not refer to its own parameter: Python does not collect cycles through such hooks, so the weights would stay
    in memory as long as the process.
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


def _add(total: Tensor, gradient: Tensor) -> None:
    """Add in place; on a CPU a few rows at a time, because PyTorch first copies `gradient` to the wider dtype."""
    if total.device.type != "cpu" or total.numel() <= _CACHED:
        total.add_(gradient)
        return
    at_once = max(1, _CACHED * len(total) // total.numel())
    for wide, narrow in zip(total.split(at_once), gradient.split(at_once), strict=True):
        wide.add_(narrow)


def _outside_backbone(model: PreTrainedModel) -> set[int]:
    backbone = {id(p) for p in model.base_model.parameters()}
    return {id(p) for p in model.parameters()} - backbone
