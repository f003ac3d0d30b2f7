"""The part of Megatron's model that AdamW updates here: the weights of this rank, or a part of them.

Each parameter of the rank has a master in at least float32: the parameter itself, or a copy where the model computes in
a narrower format. The distributed optimizer (ZeRO-1) cuts each master among the ranks that hold the same parameter;
every rank updates its part, and gathers the others. AdamW works number by number, so that neither changes a bit.
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
    """One parameter, and the part of it that this rank updates."""

    parameter: nn.Parameter
    group: Any
    """Ranks that hold the same parameter."""
    span: slice
    """Of the parameter's numbers, one after the other."""
    master: nn.Parameter
    """[numbers of the span], with memory of its own only where its format is another one."""

    @property
    def is_copy(self) -> bool:
        """Whether the master is in another format."""
        return self.master.dtype != self.parameter.dtype

    def part(self, whole: Tensor) -> Tensor:
        """The span of a tensor as large as the parameter; a view."""
        return whole.view(-1)[self.span]


class Shards:
    """The parameters of this rank, as its optimizer sees them.

    Args:
        parameters: that train, each with the group of ranks that hold the same one.
        distributed: whether these ranks share the work.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Any]], *, distributed: bool) -> None:
        self._distributed = distributed
        self._shards: list[Shard] = []
        for parameter, group in parameters:
            ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if distributed else (1, 0)
            each = -(-parameter.numel() // ranks)
            span = slice(min(each * rank, parameter.numel()), min(each * (rank + 1), parameter.numel()))
            part = parameter.data.view(-1)[span]
            wide = torch.promote_types(part.dtype, torch.float32)
            self._shards.append(Shard(parameter, group, span, nn.Parameter(part.to(wide))))
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def masters(self) -> list[nn.Parameter]:
        """The tensors that the optimizer updates."""
        return [shard.master for shard in self._shards]

    def take_gradients(self) -> None:
        """Give each master its part of the sum that Megatron keeps in ``main_grad``; a view."""
        for shard in self._shards:
            shard.master.grad = shard.part(main_grad(shard.parameter)).to(shard.master.dtype)

    @torch.no_grad()
    def give_weights(self) -> None:
        """After a step: round the masters into the model, and gather the parts of the other ranks."""
        for shard in self._shards:
            if shard.is_copy:
                shard.part(shard.parameter.data).copy_(shard.master)
        if self._distributed:
            self._gather([shard.parameter.data for shard in self._shards])

    def whole(self, values: Callable[[Shard], Tensor]) -> list[Tensor]:
        """A tensor as large as each parameter, of one value for each number of its master."""
        found = []
        for shard in self._shards:
            part = values(shard)
            tensor = part.new_empty(shard.parameter.shape)
            shard.part(tensor).copy_(part)
            found.append(tensor)
        if self._distributed:
            self._gather(found)
        return found

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the model's parameters hold other tensors of their shapes."""
        own = [shard.parameter.data for shard in self._shards]
        for shard, tensor in zip(self._shards, tensors, strict=True):
            shard.parameter.data = tensor
        try:
            yield
        finally:
            for shard, data in zip(self._shards, own, strict=True):
                shard.parameter.data = data

    def move(self, device: torch.device, *, weights: bool, copies: bool) -> None:
        """Move the model's weights, or the masters that have memory of their own, to a device."""
        for shard in self._shards:
            if weights:
                shard.parameter.data = shard.parameter.data.to(device)
                if not shard.is_copy:
                    shard.master.data = shard.part(shard.parameter.data)
            if copies and shard.is_copy:
                shard.master.data = shard.master.data.to(device)

    def _gather(self, tensors: Sequence[Tensor]) -> None:
        """Fill each tensor with the spans of the other ranks; one exchange for all of a group and format."""
        kinds: dict[tuple[Any, torch.dtype], list[tuple[Shard, Tensor]]] = {}
        for shard, tensor in zip(self._shards, tensors, strict=True):
            kinds.setdefault((shard.group, tensor.dtype), []).append((shard, tensor))
        for (group, _), pairs in kinds.items():
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            if ranks == 1:
                continue
            flat = [tensor.view(-1).split(-(-tensor.numel() // ranks)) for _, tensor in pairs]
            # A rank's spans end to end; those that are shorter than the first rank's are filled up.
            spans = [[parts[r] if r < len(parts) else parts[0][:0] for parts in flat] for r in range(ranks)]
            longest = sum(len(part) for part in spans[0])
            mine = nn.functional.pad(torch.cat(spans[rank]), (0, longest - sum(map(len, spans[rank]))))
            every = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(every, mine, group=group)
            for found, parts in zip(every, spans, strict=True):
                for part, values in zip(parts, found[: sum(map(len, parts))].split(list(map(len, parts))), strict=True):
                    part.copy_(values)


def main_grad(parameter: nn.Parameter) -> Tensor:
    """The sum of gradients that Megatron keeps for a parameter."""
    found: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return found


def _add_to_main_grad(parameter: Tensor) -> None:
    """As Megatron's own hook, which is lost when ``parameter.data`` changes its format or device."""
    assert parameter.grad is not None
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
