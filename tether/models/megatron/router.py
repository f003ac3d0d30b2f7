"""Megatron's router of tokens to experts, with losses beside the main one in which each token counts once.

Megatron scales the losses of a router by the tokens of a rank. Ranks that share the tokens of a micro-batch have parts
of unlike size, and some of their tokens only fill these parts up. Here each loss is the mean over the tokens of a
micro-batch times their number, of which each rank adds its tokens' part; the engine, which knows the tokens of all
micro-batches, divides the coefficients by their number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """Legend: n = tokens of this rank, X = experts."""

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The z-loss of logits [n, X] (ST-MoE, arXiv:2202.08906, equation 5), summed over tokens."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = logits.logsumexp(dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0.0)
        return _with_loss(logits, coefficient * squares.sum())

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, with_padding_mask: bool = False) -> Tensor:
        return self._balanced("aux_loss", probs, scores, chosen, self.tp_cp_group)

    def _apply_seq_aux_loss(self, probs: Tensor, scores: Tensor, chosen: Tensor, *_: Any, **__: Any) -> Tensor:
        """Packed rows are one sequence to Megatron."""
        return self._balanced("seq_aux_loss", probs, scores, chosen, self.tp_cp_group)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores: Tensor, chosen: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Over the micro-batches that the replicas have at the same time."""
        return self._balanced("global_aux_loss", probs, scores, chosen, self.tp_dp_cp_group)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Counts nothing for an update of the bias, which stays as it was pretrained."""

    def _balanced(self, kind: str, probs: Tensor, scores: Tensor, chosen: Tensor, group: Any) -> Tensor:
        """The auxiliary loss of scores [n, X] and choices [n, X] (Switch Transformer, arXiv:2101.03961, equation 4).

        Both are zero at tokens that do not count.
        """
        coefficient = self.get_aux_loss_coeff(kind)
        if not coefficient:
            return probs
        counts = chosen.sum(dim=0)
        dist.all_reduce(counts, group=group)
        shares = counts / counts.sum().clamp(min=1)
        return _with_loss(probs, coefficient * len(counts) * (scores * shares).sum())


def _with_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """The same tensor, with which the gradient of the loss goes back."""
    carried: Tensor = MoEAuxLossAutoScaler.apply(carrier, loss)
    return carried
