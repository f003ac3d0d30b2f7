"""Outputs of the last stage from hidden states: log-probabilities over a sharded vocabulary, or values.

Megatron's output layer would compute the logits of all tokens. `StatesHead` replaces it and returns the hidden states,
so that logits are computed in chunks and for the predicted tokens only, by each rank for its shard of the vocabulary
(`tether.text.models.output.token_log_probs`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


class StatesHead(nn.Module):
    """Replaces a policy's output layer: stores its weight, and returns the hidden states."""

    def __init__(self, output_layer: nn.Module, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = cast("Any", output_layer).weight  # None: the embedding's weight is used
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Gather the states [N, 1, E] of all tensor-parallel ranks; their gradients are summed over ranks."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden), None
        return copy_to_tensor_model_parallel_region(hidden), None


class MegatronValueHead(nn.Module):
    """A scalar head in float32, equal on all tensor-parallel ranks; its weights are zero until they are loaded."""

    def __init__(self, hidden_size: int, with_bias: bool, sequence_parallel: bool, like: Tensor) -> None:
        super().__init__()
        device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) if with_bias else None
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Gather the states [N, 1, E] of all tensor-parallel ranks; gradients are not summed, since each rank already
        computes the full gradient."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False), None
        return hidden, None

    def values(self, states: Tensor) -> Tensor:
        """Return values [N] of states [N, E], in at least float32."""
        return nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)[:, 0]


def replace_output_layer(chunk: Any, role: str, with_bias: bool) -> None:
    """Replace the output layer of the last stage by the head of a role."""
    layer, config = chunk.output_layer, chunk.config
    if role == "policy":
        chunk.output_layer = StatesHead(layer, config.sequence_parallel)
    else:
        like = chunk.decoder.final_layernorm.weight
        chunk.output_layer = MegatronValueHead(config.hidden_size, with_bias, config.sequence_parallel, like)
