"""Megatron's router of tokens to experts, with auxiliary losses that weight all tokens equally.

Megatron scales the losses of a router by the number of tokens on a rank. But ranks that split the tokens of a
micro-batch have different numbers of tokens, and some are padding. Here each loss is the mean over the tokens of a
micro-batch times their number, and each rank adds the share of its tokens; the engine divides the coefficients by the
number of tokens in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """A router whose losses are sums over tokens, and whose experts can be replayed or recorded.

    Legend: n = tokens of this rank, X = experts, k = experts per token.
    """

    record: Callable[[Tensor], None] | None = None
    """Called with the experts [n, k] of each forward pass."""

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as Megatron's router does; `padding_mask` [n, 1, 1 + X] may come from `with_experts`."""
        experts = None
        if padding_mask is not None and padding_mask.dim() == 3:
            experts, padding_mask = padding_mask[:, 0, 1:], padding_mask[..., 0]
        self.router_replay = None if experts is None and self.record is None else _Choice(experts, self.record)
        routed: tuple[Tensor, Tensor] = super().forward(input, padding_mask)
        return routed

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the z-loss of logits [n, X] (ST-MoE, arXiv:2202.08906, equation 5), summed over tokens."""
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
        """Treat packed rows as one sequence, as Megatron does."""
        return self._balanced("seq_aux_loss", probs, scores, chosen, self.tp_cp_group)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores: Tensor, chosen: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Compute the loss over the micro-batches that the replicas run at the same time."""
        return self._balanced("global_aux_loss", probs, scores, chosen, self.tp_dp_cp_group)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Leave the expert bias as it was pretrained."""

    def _balanced(self, kind: str, probs: Tensor, scores: Tensor, chosen: Tensor, group: Any) -> Tensor:
        """Add the auxiliary loss of scores [n, X] and choices [n, X] (Switch Transformer, arXiv:2101.03961, eq. 4).

        Scores and choices are zero for padding.
        """
        coefficient = self.get_aux_loss_coeff(kind)
        if not coefficient:
            return probs
        counts = chosen.sum(dim=0)
        dist.all_reduce(counts, group=group)
        shares = counts / counts.sum().clamp(min=1)
        return _with_loss(probs, coefficient * len(counts) * (scores * shares).sum())


def with_experts(padding: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Return a padding mask that also contains the experts that a router must choose.

    Megatron passes the mask to a router as an input of its layer, so a recomputed layer chooses the same experts
    whatever ran in between.

    Args:
        padding: [1, n] bool.
        experts: [n, k]; -1 leaves the choice to the router.
        num_experts: X.

    Returns:
        [1, n, 1 + X] bool.
    """
    is_fixed = experts >= 0
    fixed = torch.zeros(len(experts), num_experts, dtype=torch.bool, device=experts.device)
    fixed.scatter_(1, experts.where(is_fixed, 0).long(), is_fixed)
    return torch.cat([padding[..., None], fixed[None]], dim=-1)


@dataclass(frozen=True)
class _Choice:
    """Replays and records experts, as a replacement for Megatron's RouterReplay."""

    experts: Tensor | None
    """[n, X] bool: the experts of each token; the router chooses those of tokens without any."""
    record: Callable[[Tensor], None] | None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of k experts of each token, best first, and these experts, from scores [n, X]."""
        values, indices = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is not None:
            replayed = scores.masked_fill(~self.experts, -torch.inf).topk(topk, dim=1).indices
            indices = torch.where(self.experts.any(dim=1, keepdim=True), replayed, indices)
            values = scores.gather(1, indices)
        if self.record is not None:
            self.record(indices)
        return values, indices


def _with_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """Return the tensor unchanged; its backward pass also computes the gradient of the loss."""
    carried: Tensor = MoEAuxLossAutoScaler.apply(carrier, loss)
    return carried
