"""Copies of an engine's state, so that it can be written while training continues."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def with_weights(model: PreTrainedModel, weights: Iterable[Tensor]) -> PreTrainedModel:
    """Copy a model with these tensors as its parameters; tied parameters stay tied."""
    pairs = zip(model.parameters(), weights, strict=True)
    return copy.deepcopy(model, {id(p): nn.Parameter(tensor, requires_grad=p.requires_grad) for p, tensor in pairs})


def to_cpu(value: Tensor) -> Tensor:
    """Copy a tensor to the CPU."""
    return value.detach().to("cpu", copy=True)


def tree_to_cpu(tree: Any) -> Any:
    """Copy all tensors in a tree of dicts and lists to the CPU; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return to_cpu(tree)
    if isinstance(tree, dict):
        return {key: tree_to_cpu(value) for key, value in tree.items()}
    return [tree_to_cpu(value) for value in tree] if isinstance(tree, list) else tree


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the class and the buffers of a model, without its weights."""
    return with_weights(model, (p.to(torch.device("meta")) for p in model.parameters()))


def with_all_names(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each tensor of a model's state once, with the names of all parameters that are tied to it."""
    ties = defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties[id(parameter)].append(name)
    names = {first: [first, *others] for first, *others in ties.values()}
    second = {other for _, *others in ties.values() for other in others}
    yield from ((names.get(name, [name]), value) for name, value in model.state_dict().items() if name not in second)
