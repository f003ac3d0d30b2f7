"""Experts of a layer: in files a tensor each, in the memory of transformers' models one tensor of all.

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
    """Tensors by their names in files -> by those in memory, each as soon as all of its parts were seen.

    Args:
        tensors: name and value.
        experts: of a layer.
    """
    waiting: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, value
            continue
        layer, number, kind = match[1], int(match[2]), match[3]
        parts = waiting.setdefault(layer, {})
        parts[number, kind] = value
        if len(parts) == 3 * experts:
            every = range(experts)
            yield (
                f"{layer}.gate_up_proj",
                torch.stack([torch.cat([parts[x, "gate"], parts[x, "up"]]) for x in every]),
            )
            yield f"{layer}.down_proj", torch.stack([parts[x, "down"] for x in every])
            del waiting[layer]
    assert not waiting, f"experts that lack: {sorted(waiting)}"


class Unfused(Mapping[str, Tensor]):
    """The other way: tensors by their names in memory, read by those in files, as views."""

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
