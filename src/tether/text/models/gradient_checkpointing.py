"""Gradient checkpointing: layers store only their inputs, and run again in the backward pass."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

FUNCTION = "_gradient_checkpointing_func"  # attribute in which transformers' layers look for it
LARGE = 1 << 21  # bytes of a large page


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass; effective in train mode, without changing gradients."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # depends on the version
    enable({"use_reentrant": False})
    # transformers makes the embeddings require a gradient with a local function that cannot be pickled. Only reentrant
    # checkpointing needs that.
    model.disable_input_require_grads()
    for module in model.modules():
        if hasattr(module, FUNCTION):
            setattr(module, FUNCTION, _checkpointed)


def in_own_pages(x: Any) -> Any:
    """Return the tensor in memory pages of its own, if it is large and in Linux's main memory.

    Stored tensors would otherwise be interleaved with freed ones in malloc's memory and leave holes that are too small
    for the next layer, so that the peak of an update would be far above the memory in use.
    """
    if not isinstance(x, Tensor):  # GPT-2 hands its layers None by position
        return x
    is_moved = sys.platform == "linux" and x.device.type == "cpu" and x.nbytes >= LARGE
    return _InOwnPages.apply(x) if is_moved else x


class _InOwnPages(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        pages = mmap.mmap(-1, x.nbytes)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=x.dtype).view(x.shape).copy_(x)

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad


def _checkpointed(layer: object, *inputs: object) -> object:
    return checkpoint(layer, *map(in_own_pages, inputs), use_reentrant=False)
