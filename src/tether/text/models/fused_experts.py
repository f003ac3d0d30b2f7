"""Converts the experts of a layer between files, with one tensor per expert, and models, with one tensor for all.

``mlp.experts.3.gate_proj.weight`` [F, E], ``up_proj`` and ``down_proj`` [E, F] of X experts become
``mlp.experts.gate_up_proj`` [X, 2F, E] and ``mlp.experts.down_proj`` [X, E, F].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fused(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors from their names in files to those in memory; a fused tensor is yielded once all of its experts
    have arrived.
    """
    waiting: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, value
            continue
        layer, index, kind = match[1], int(match[2]), match[3]
        weights = waiting.setdefault(layer, {})
        weights[index, kind] = value
        if len(weights) == 3 * experts:
            indices = range(experts)
            yield (
                f"{layer}.gate_up_proj",
                torch.stack([torch.cat([weights[x, "gate"], weights[x, "up"]]) for x in indices]),
            )
            yield f"{layer}.down_proj", torch.stack([weights[x, "down"] for x in indices])
            del waiting[layer]
    assert not waiting, f"incomplete experts: {sorted(waiting)}"


class Unfused(Mapping[str, Tensor]):
    """The inverse: gives tensors in memory the names that they have in files; values are views."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        match = _EXPERT.fullmatch(name)
        if match is None or f"{match[1]}.gate_up_proj" not in self._tensors:
            return self._tensors[name]
        if match[3] == "down":
            return self._tensors[f"{match[1]}.down_proj"][int(match[2])]
        return self._tensors[f"{match[1]}.gate_up_proj"][int(match[2])].chunk(2)[match[3] == "up"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
