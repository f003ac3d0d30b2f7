"""Gradient checkpointing: layers keep their inputs alone, and run again in the backward pass."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

FUNCTION = "_gradient_checkpointing_func"  # where transformers' layers look for it
LARGE = 1 << 21  # bytes: a large page


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass; takes effect in train mode, and changes no gradient."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # by version
    enable({"use_reentrant": False})
    # transformers lets the embeddings ask for a gradient, by a local function that no pickle takes. Only reentrant
    # checkpointing needs that.
    model.disable_input_require_grads()
    for module in model.modules():
        if hasattr(module, FUNCTION):
            setattr(module, FUNCTION, _run_again_on_the_way_back)


def in_pages_of_its_own(x: Any) -> Any:
    """The same numbers, for as long as a layer needs them: a large tensor of Linux's memory is copied out of malloc's.

    What layers keep would lie between what they free, and leave holes that are too small for the next layer: the peak
    of an update would be far above what is in use.
    """
    if not isinstance(x, Tensor):  # GPT-2 hands its layers None by position
        return x
    is_moved = sys.platform == "linux" and x.device.type == "cpu" and x.nbytes >= LARGE
    return _InPagesOfItsOwn.apply(x) if is_moved else x


class _InPagesOfItsOwn(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        pages = mmap.mmap(-1, x.nbytes)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=x.dtype).view(x.shape).copy_(x)

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad


def _run_again_on_the_way_back(layer: object, *inputs: object) -> object:
    return checkpoint(layer, *map(in_pages_of_its_own, inputs), use_reentrant=False)
