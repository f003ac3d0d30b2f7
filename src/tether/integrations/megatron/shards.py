"""The shards of Megatron's model that AdamW updates: this rank's weights, or a slice of them.

Each parameter of the rank has a master in at least float32: the parameter itself, or a copy if the model computes in a
narrower dtype. The distributed optimizer (ZeRO-1) splits each master over the ranks that have the same parameter; every
rank updates its slice and gathers the others. AdamW is elementwise, so splitting does not change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Shard:
    """A parameter, and the slice of it that this rank updates."""

    parameter: nn.Parameter
    group: Any
    """The ranks that have the same parameter."""
    span: slice
    """The slice of the parameter's flattened elements."""
    master: nn.Parameter
    """[elements of the span]: shares the parameter's memory unless their dtypes differ."""

    @property
    def is_copy(self) -> bool:
        """Whether the master has a different dtype than the parameter, and separate memory."""
        return self.master.dtype != self.parameter.dtype

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return a view of the span in a tensor of the parameter's shape."""
        return tensor.view(-1)[self.span]


class Shards:
    """The shards of this rank's parameters that its optimizer updates.

    Args:
        parameters: the trained parameters, each with the group of ranks that have the same one.
        distributed: whether the ranks of a group split the update.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Any]], *, distributed: bool) -> None:
        self._distributed = distributed
        self._shards: list[Shard] = []
        for parameter, group in parameters:
            ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if distributed else (1, 0)
            each = -(-parameter.numel() // ranks)
            span = slice(min(each * rank, parameter.numel()), min(each * (rank + 1), parameter.numel()))
            elements = parameter.data.view(-1)[span]
            wide = torch.promote_types(elements.dtype, torch.float32)
            self._shards.append(Shard(parameter, group, span, nn.Parameter(elements.to(wide))))
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def masters(self) -> list[nn.Parameter]:
        """Return the tensors that the optimizer updates."""
        return [shard.master for shard in self._shards]

    def take_gradients(self) -> None:
        """Set each master's gradient to its slice of Megatron's ``main_grad``, as a view if dtypes match."""
        for shard in self._shards:
            shard.master.grad = shard.view_of(main_grad(shard.parameter)).to(shard.master.dtype)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Copy the masters to the model after a step, rounded, and gather the slices of the other ranks."""
        for shard in self._shards:
            if shard.is_copy:
                shard.view_of(shard.parameter.data).copy_(shard.master)
        if self._distributed:
            self._gather([shard.parameter.data for shard in self._shards])

    def full_tensors(self, values: Callable[[Shard], Tensor]) -> list[Tensor]:
        """Return a tensor of each parameter's shape, given a tensor with one value per element of its master."""
        tensors = []
        for shard in self._shards:
            elements = values(shard)
            tensor = elements.new_empty(shard.parameter.shape)
            shard.view_of(tensor).copy_(elements)
            tensors.append(tensor)
        if self._distributed:
            self._gather(tensors)
        return tensors

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replace the model's parameters by tensors of the same shapes inside the context."""
        original = [shard.parameter.data for shard in self._shards]
        for shard, tensor in zip(self._shards, tensors, strict=True):
            shard.parameter.data = tensor
        try:
            yield
        finally:
            for shard, data in zip(self._shards, original, strict=True):
                shard.parameter.data = data

    def move(self, device: torch.device, *, weights: bool, copies: bool) -> None:
        """Move the model's weights, or the masters that have their own memory, to a device."""
        for shard in self._shards:
            if weights:
                shard.parameter.data = shard.parameter.data.to(device)
                if not shard.is_copy:
                    shard.master.data = shard.view_of(shard.parameter.data)
            if copies and shard.is_copy:
                shard.master.data = shard.master.data.to(device)

    def _gather(self, tensors: Sequence[Tensor]) -> None:
        """Fill each tensor with the slices of the other ranks, in one exchange per group and dtype."""
        kinds: dict[tuple[Any, torch.dtype], list[tuple[Shard, Tensor]]] = {}
        for shard, tensor in zip(self._shards, tensors, strict=True):
            kinds.setdefault((shard.group, tensor.dtype), []).append((shard, tensor))
        for (group, _), pairs in kinds.items():
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            if ranks == 1:
                continue
            flat = [tensor.view(-1).split(-(-tensor.numel() // ranks)) for _, tensor in pairs]
            # Each rank's slices are concatenated; slices shorter than the first rank's are padded.
            spans = [[slices[r] if r < len(slices) else slices[0][:0] for slices in flat] for r in range(ranks)]
            longest = sum(len(span) for span in spans[0])
            mine = nn.functional.pad(torch.cat(spans[rank]), (0, longest - sum(map(len, spans[rank]))))
            every = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(every, mine, group=group)
            for received, slices in zip(every, spans, strict=True):
                sizes = list(map(len, slices))
                for target, values in zip(slices, received[: sum(sizes)].split(sizes), strict=True):
                    target.copy_(values)


def main_grad(parameter: nn.Parameter) -> Tensor:
    """Return the gradient that Megatron accumulates for a parameter."""
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def _add_to_main_grad(parameter: Tensor) -> None:
    """Accumulate the gradient like Megatron's hook, which is lost when ``parameter.data`` changes dtype or device."""
    assert parameter.grad is not None
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
