"""Several rollouts as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tether.batch import RolloutBatch


def join_rollouts(rollouts: Sequence[RolloutBatch], groups: Sequence[int]) -> RolloutBatch:
    """Put rows one after another, no wider than the longest prompt and response among them need.

    Args:
        rollouts: at least one.
        groups: for each rollout, the prompt group that all its rows belong to in the result (`uid`).
    """
    prompts = max(int(rollout.prompt_length.max()) for rollout in rollouts)
    responses = max(int(rollout.response_length.max()) for rollout in rollouts)

    def fitted(name: str, tensor: Tensor) -> Tensor:
        return tensor if tensor.ndim == 1 else _with_width(tensor, prompts if name == "prompt_ids" else responses)

    pieces = []
    for rollout, group in zip(rollouts, groups, strict=True):
        fields = {name: fitted(name, tensor) for name, tensor in rollout.to_dict().items() if tensor is not None}
        fields["uid"] = torch.full_like(rollout.uid, group)
        pieces.append(RolloutBatch.from_dict(fields, batch_size=rollout.batch_size))
    joined: RolloutBatch = torch.cat(pieces)  # type: ignore[arg-type, assignment]  # tensordict's classes
    return joined


def _with_width(tensor: Tensor, width: int) -> Tensor:
    """[B, W, ...] -> [B, width, ...]: cut, or filled with zeros."""
    result = tensor.new_zeros(tensor.shape[0], width, *tensor.shape[2:])
    kept = min(width, tensor.shape[1])
    result[:, :kept] = tensor[:, :kept]
    return result
