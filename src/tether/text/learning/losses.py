"""The losses of policy and critic for one micro-batch: token losses of `tether.algorithms`, aggregated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.algorithms import (
    TOKEN_SELECTIONS,
    Max,
    Mean,
    aggregate_loss,
    kl_penalty,
    masked_mean_ratio,
    value_loss,
)
from tether.batch import TrainBatch, filled
from tether.loop.engine import LossSizes, LossTerm
from tether.loop.own_functions import policy_loss
from tether.text.learning.forward import PolicyOutputs, ValueOutputs


@dataclass(frozen=True)
class Aggregation:
    """The aggregation of losses per token into one number."""

    mode: str = "token-mean"
    """One of `tether.algorithms.AGGREGATIONS`, or ``masked_mean_ratio`` with each row as an episode."""
    scale_factor: float | None = None
    """Divisor of modes with ``-norm``, or length of an episode of full weight for ``masked_mean_ratio``; the default is
    the width."""
    width: int | None = None
    """Tokens that a response may have. None is the longest response of the batch, so that the weight of a row in these
    two modes depends on the length of the others."""

    def __call__(self, loss: Tensor, mask: Tensor, sizes: LossSizes) -> Tensor:
        """Return this micro-batch's share of the mini-batch's loss from token losses [b, T]."""
        width = self.width or loss.shape[1]
        if self.mode == "masked_mean_ratio":
            return masked_mean_ratio(
                loss,
                mask,
                episode_length=mask.sum(dim=-1, keepdim=True),
                max_episode_length=self.scale_factor or width,
                num_elements=sizes.num_sequences * width,
            )
        return aggregate_loss(
            loss,
            mask,
            self.mode,
            num_tokens=sizes.num_tokens,
            num_sequences=sizes.num_sequences,
            max_length=self.scale_factor or width,
        )


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss, minus the entropy bonus, plus the KL to the reference."""

    name: str = "vanilla"
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the policy loss, such as clip ratios."""
    aggregation: Aggregation = Aggregation()
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"

    def __call__(self, outputs: PolicyOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        """Compute the loss as a `tether.loop.engine.LossFunction`; needs `advantages`.

        Without `old_log_probs` the policy is taken as the old one, as in the first update after a rollout: every ratio
        is 1, and only its gradient matters.
        """
        mask = batch.response_mask
        old_log_probs = outputs.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        token_loss = policy_loss(self.name)(
            outputs.log_probs,
            old_log_probs,
            batch.advantages,
            mask,
            selected=batch.selected,
            rollout_log_probs=batch.rollout_log_probs,
            rollout_is_weights=batch.rollout_is_weights,
            **self.options,
        )
        metrics = dict(token_loss.metrics)
        total = self.aggregation(token_loss.loss, mask, sizes)
        shares = {"actor/pg_loss": total}
        if outputs.entropy is not None:
            metrics["actor/entropy"] = Mean.of(outputs.entropy, mask)
        if self.entropy_coeff:
            assert outputs.entropy is not None
            entropy = self.aggregation(outputs.entropy, mask, sizes)
            total = total - self.entropy_coeff * entropy
        if self.kl_coef:
            kl = self.aggregation(self._kl(outputs, batch), mask, sizes)
            total = total + self.kl_coef * kl
            shares["actor/kl_loss"] = kl
            metrics["actor/kl_coef"] = Max(torch.tensor(self.kl_coef, dtype=torch.float64))
        return LossTerm(total, metrics, shares)

    def _kl(self, outputs: PolicyOutputs, batch: TrainBatch) -> Tensor:
        if self.kl_kind == "full":
            return filled(outputs.full_kl)
        return kl_penalty(outputs.log_probs, filled(batch.ref_log_probs), self.kl_kind, batch.response_mask)


@dataclass(frozen=True)
class TokenSelection:
    """Selects tokens for a policy loss that treats some tokens of a mini-batch differently (`TOKEN_SELECTIONS`).

    It selects before the mini-batch is split: among the tokens of a micro-batch it would select others, and the
    gradient would depend on how many rows fit into memory.
    """

    name: str
    options: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of the selection."""

    def __call__(self, mini: TrainBatch, outputs: PolicyOutputs, generator: torch.Generator) -> None:
        """Fill in `selected`, as a `tether.loop.engine.Prepare`."""
        mini.selected = TOKEN_SELECTIONS[self.name](
            outputs.log_probs,
            mini.old_log_probs,
            mini.advantages,
            mini.response_mask,
            generator=generator,
            **self.options,
        )


@dataclass(frozen=True)
class CriticLoss:
    """The clipped value loss."""

    cliprange_value: float | None = 0.5
    """Clip range of values; None for no clipping."""
    huber_delta: float | None = None
    aggregation: Aggregation = Aggregation()

    def __call__(self, outputs: ValueOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        """Compute the loss as a `tether.loop.engine.LossFunction`; needs `values` and `returns`."""
        mask = batch.response_mask
        token_loss = value_loss(
            outputs.values,
            filled(batch.values),
            filled(batch.returns),
            mask,
            cliprange_value=self.cliprange_value,
            huber_delta=self.huber_delta,
        )
        total = self.aggregation(token_loss.loss, mask, sizes)
        return LossTerm(total, token_loss.metrics)
