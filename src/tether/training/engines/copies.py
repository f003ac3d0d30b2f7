"""Copies of what an engine holds, so that they can be written while it learns."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def with_weights(model: PreTrainedModel, weights: Iterable[Tensor]) -> PreTrainedModel:
    """A copy of a model with other tensors as its parameters; ties between them survive."""
    pairs = zip(model.parameters(), weights, strict=True)
    return copy.deepcopy(model, {id(p): nn.Parameter(tensor, requires_grad=p.requires_grad) for p, tensor in pairs})


def kept(value: Tensor) -> Tensor:
    """A copy of a tensor in the memory of the host."""
    return value.detach().to("cpu", copy=True)


def kept_tree(tree: Any) -> Any:
    """The same of all tensors in a tree of dicts and lists; other leaves as they are."""
    if isinstance(tree, Tensor):
        return kept(tree)
    if isinstance(tree, dict):
        return {key: kept_tree(value) for key, value in tree.items()}
    return [kept_tree(value) for value in tree] if isinstance(tree, list) else tree


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The class and the buffers of a model, without its weights."""
    return with_weights(model, (p.to(torch.device("meta")) for p in model.parameters()))


def with_all_names(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Each tensor of a model's state once, after the names of all that are tied to it."""
    ties = defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties[id(parameter)].append(name)
    names = {first: [first, *others] for first, *others in ties.values()}
    second = {other for _, *others in ties.values() for other in others}
    yield from ((names.get(name, [name]), value) for name, value in model.state_dict().items() if name not in second)
