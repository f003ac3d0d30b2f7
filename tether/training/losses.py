"""The losses of policy and critic for one micro-batch: token losses of `tether.algorithms`, aggregated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tether.algorithms import POLICY_LOSSES, Mean, aggregate_loss, kl_penalty, value_loss
from tether.batch import TrainBatch, filled
from tether.training.forward import PolicyOutputs, ValueOutputs
from tether.training.protocol import LossSizes, LossTerm


@dataclass(frozen=True)
class Aggregation:
    """How token losses become one number (`tether.algorithms.aggregate_loss`)."""

    mode: str = "token-mean"
    scale_factor: float | None = None
    """Divisor of ``seq-mean-token-sum-norm``; None is the response width."""

    def __call__(self, loss: Tensor, mask: Tensor, sizes: LossSizes) -> Tensor:
        """[b, T] -> this micro-batch's share of the mini-batch's loss."""
        return aggregate_loss(
            loss,
            mask,
            self.mode,
            num_tokens=sizes.num_tokens,
            num_sequences=sizes.num_sequences,
            max_length=self.scale_factor or loss.shape[1],
        )


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss, minus the entropy bonus, plus the KL to the reference."""

    name: str = "vanilla"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the policy loss: clip ratios and the like."""
    aggregation: Aggregation = Aggregation()
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"

    def __call__(self, outputs: PolicyOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        """See `tether.training.protocol.LossFunction`; needs `old_log_probs` and `advantages`."""
        mask = batch.response_mask
        token_loss = POLICY_LOSSES[self.name](
            outputs.log_probs,
            batch.old_log_probs,
            batch.advantages,
            mask,
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
            kl = self.aggregation(
                kl_penalty(outputs.log_probs, filled(batch.ref_log_probs), self.kl_kind, mask), mask, sizes
            )
            total = total + self.kl_coef * kl
            shares["actor/kl_loss"] = kl
        return LossTerm(total, metrics, shares)


@dataclass(frozen=True)
class CriticLoss:
    """Clipped value loss."""

    cliprange_value: float | None = 0.5
    """None: no clip."""
    huber_delta: float | None = None
    aggregation: Aggregation = Aggregation()

    def __call__(self, outputs: ValueOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        """See `tether.training.protocol.LossFunction`; needs `values` and `returns`."""
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
