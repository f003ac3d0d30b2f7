"""The loss of a control policy: a plain spec, by the names and coefficients of `tether.algorithms`.

Legend: B decisions, each on K actions of D columns; L and V numbers per decision: see `chunk_levels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.algorithms import TOKEN_SELECTIONS, TokenLoss, masked_mean, merge_metrics, value_loss
from tether.batch import filled
from tether.training.control.chunk_levels import Level, mask_at, per_column, sum_to_level
from tether.training.control.closed_form_gradients import Draws, LossGradient, policy_gradient, value_gradient
from tether.training.control.forward import DecisionOutputs
from tether.training.control.samples import EPISODES_WEIGH_EQUALLY, Samples, loss_weights
from tether.training.own_functions import policy_loss
from tether.training.protocol import LossSizes, LossTerm


@dataclass(frozen=True)
class Outputs:
    """A policy's outputs for a mini-batch, before its optimizer step."""

    log_probs: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, K * D]"""
    values: Tensor | None
    """[B, V]"""
    loss: TokenLoss | None
    """Of the policy, where its gradient needed it."""
    policy_grad_norm: Tensor | None = None
    """Of the gradient of the mean loss by the policy's outputs [B, outputs]; None: only the critic was trained. A
    critic's gradient has no part in it, whatever the two share."""


@dataclass(frozen=True)
class ControlLoss:
    """L = policy loss - entropy_coeff x mean entropy + value_coeff x value loss."""

    name: str = "vanilla"
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Keywords of the policy loss: clip ratios and the like."""
    selection: Mapping[str, float] = field(default_factory=dict)
    """Keywords of the choice of the elements that some losses treat apart."""
    aggregation: str = "token-mean"
    """Aggregation of the policy's losses; the critic's are weighed alike under ``masked_mean_ratio``."""
    max_length: float | None = None
    """Divisor of modes with ``-norm``; None: the elements of a row."""
    entropy_coeff: float = 0.0
    value_coeff: float = 1.0
    cliprange_value: float | None = None
    huber_delta: float | None = None
    logprob_level: Level = "action_level"
    entropy_level: Level = "action_level"
    critic_only: bool = False
    """The value loss alone: the policy stays as it is."""

    def __call__(self, outputs: DecisionOutputs, samples: Samples, sizes: LossSizes) -> LossTerm:
        """One micro-batch's share of the loss, differentiable; see `tether.training.protocol.LossFunction`.

        `FlatEngine` takes the same loss by its closed forms.
        """
        width = outputs.log_probs.shape[1]
        chunk = 1 if samples.mask is None else samples.mask.shape[1]
        counted = mask_at(self.logprob_level, samples.mask, width)
        log_probs = self.log_probs(outputs.log_probs, samples.mask, chunk)
        token_loss = self.token_loss(log_probs, samples, width)
        whole = (sizes.num_sequences, self._elements(self.logprob_level, sizes, width, chunk))
        weights = loss_weights(self.aggregation, log_probs, counted, samples.weights, self.max_length, whole)
        policy = (token_loss.loss * weights).sum()
        total, metrics = policy, dict(token_loss.metrics)
        entropy = sum_to_level(outputs.entropy, self.entropy_level, chunk, samples.mask)
        total = total - self.entropy_coeff * entropy.sum() / self._elements(self.entropy_level, sizes, width, chunk)
        if self.critic_only:
            total = torch.zeros_like(total)
        if outputs.values is not None:
            counted, weights = self._value_weights(outputs.values, samples, sizes)
            mask = torch.ones_like(outputs.values, dtype=torch.bool) if counted is None else counted
            critic = value_loss(
                outputs.values, filled(samples.values), filled(samples.returns), mask,
                cliprange_value=self.cliprange_value, huber_delta=self.huber_delta,
            )  # fmt: skip
            total = total + (critic.loss * weights).sum()
            metrics |= critic.metrics
        return LossTerm(total, metrics, {"actor/pg_loss": policy})

    def log_probs(self, columns: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """Log-probabilities [B, L] at the level of the loss, from those of the columns [B, K * D]."""
        return sum_to_level(columns, self.logprob_level, chunk, mask)

    @property
    def selects(self) -> bool:
        """The policy loss treats some elements apart."""
        return self.name in TOKEN_SELECTIONS

    def token_loss(self, log_probs: Tensor, rows: Samples, width: int) -> TokenLoss:
        """The policy's loss of each element; for the arguments see `policy_gradient`."""
        counted = mask_at(self.logprob_level, rows.mask, width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        return policy_loss(self.name)(
            log_probs, rows.old_log_probs, rows.advantages, mask, rollout_log_probs=rows.old_log_probs,
            selected=rows.selected, **self.options,
        )  # fmt: skip

    def select(self, log_probs: Tensor, rows: Samples, width: int, draws: Draws) -> Tensor:
        """The elements [B, L] that the policy loss treats apart; for the arguments see `policy_gradient`."""
        counted = mask_at(self.logprob_level, rows.mask, width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        choose = TOKEN_SELECTIONS[self.name]
        return choose(log_probs, rows.old_log_probs, rows.advantages, mask, generator=draws(), **self.selection)

    def policy_gradient(self, log_probs: Tensor, rows: Samples, width: int, draws: Draws) -> LossGradient:
        """Gradient of the policy loss by the log-probabilities, weighted by the aggregation.

        Args:
            log_probs: [B, L].
            rows: the mini-batch.
            width: K * D.
            draws: makes the generator for losses that choose elements at random.
        """
        counted = mask_at(self.logprob_level, rows.mask, width)
        differentiate = policy_gradient(self.name, self.options, self.selection)
        found = differentiate(log_probs, rows.old_log_probs, rows.advantages, counted, draws)
        return LossGradient(found.by_log_probs * self._weights(log_probs, rows, width), found.loss)

    def values_gradient(self, values: Tensor, rows: Samples) -> Tensor:
        """Gradient of the loss by the values, [B, V]."""
        assert rows.values is not None
        assert rows.returns is not None
        counted, weights = self._value_weights(values, rows)
        grad = value_gradient(
            values, rows.values, rows.returns, cliprange_value=self.cliprange_value, huber_delta=self.huber_delta
        )
        if counted is not None:
            grad = torch.where(counted, grad, 0.0)
        return grad * weights

    def entropy_gradient(self, entropy: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """Gradient of the loss by the entropy of each column [B, K * D], or [1, 1] where it is the same for all."""
        level, (rows, width), coeff = self.entropy_level, entropy.shape, self.entropy_coeff
        if mask is None:
            columns = {"token_level": width, "action_level": chunk, "chunk_level": 1}[level]
            return entropy.new_full((1, 1), -coeff / (rows * columns))
        counted = mask_at(level, mask, width)
        elements = rows if counted is None else int(counted.sum())
        return per_column(mask, width).to(entropy.dtype) * (-coeff / elements)

    def metrics(self, rows: Samples, outputs: Sequence[Outputs], chunk: int, width: int) -> dict[str, float]:
        """Losses and statistics of all samples, each as it was when its mini-batch came.

        Args:
            rows: the samples, in the order of the outputs.
            outputs: of each mini-batch.
            chunk: K.
            width: K * D.
        """
        if not outputs:
            return {}
        columns = torch.cat([output.entropy for output in outputs])
        entropy = sum_to_level(columns, self.entropy_level, chunk, rows.mask)
        counted = mask_at(self.entropy_level, rows.mask, width)
        found = {"actor/entropy": float(entropy.mean() if counted is None else masked_mean(entropy, counted))}
        if not self.critic_only:
            found |= self._policy_metrics(rows, outputs, width)
        if rows.values is None or rows.returns is None:
            return found
        values = torch.cat([output.values for output in outputs if output.values is not None])
        counted = None if values.shape[1] == 1 else rows.mask
        critic = value_loss(
            values,
            rows.values,
            rows.returns,
            torch.ones_like(values, dtype=torch.bool) if counted is None else counted,
            cliprange_value=self.cliprange_value,
            huber_delta=self.huber_delta,
        )
        return found | {name: float(metric) for name, metric in critic.metrics.items()}

    def _policy_metrics(self, rows: Samples, outputs: Sequence[Outputs], width: int) -> dict[str, float]:
        log_probs = torch.cat([output.log_probs for output in outputs])
        known = [output.loss for output in outputs if output.loss is not None]
        if known:
            loss = TokenLoss(
                torch.cat([piece.loss for piece in known]), merge_metrics(piece.metrics for piece in known)
            )
        else:
            loss = self.token_loss(log_probs, rows, width)
        found = {name: float(metric) for name, metric in loss.metrics.items()}
        norms = [  # root mean squares, over the decisions, of the gradient of a decision's own loss
            float(output.policy_grad_norm) * math.sqrt(len(output.log_probs))
            for output in outputs
            if output.policy_grad_norm is not None
        ]
        return found | {
            "actor/pg_loss": float((loss.loss * self._weights(log_probs, rows, width)).sum()),
            "actor/policy_grad_norm": sum(norms) / len(norms),
        }

    @staticmethod
    def _elements(level: Level, sizes: LossSizes, width: int, chunk: int) -> int:
        """Elements at a level of a mini-batch of so many actions and decisions."""
        if level == "chunk_level":
            return sizes.num_sequences
        return sizes.num_tokens * (width // chunk if level == "token_level" else 1)

    def _value_weights(
        self, values: Tensor, rows: Samples, sizes: LossSizes | None = None
    ) -> tuple[Tensor | None, Tensor | float]:
        """Values [B, V] that count (None: all), and the weight of each in the loss.

        Args:
            values: whose shape is asked for.
            rows: of the micro-batch.
            sizes: of the mini-batch; None: the rows are all of it.
        """
        counted = None if values.shape[1] == 1 else rows.mask  # one before each action, or one of the chunk
        mode = EPISODES_WEIGH_EQUALLY if self.aggregation == EPISODES_WEIGH_EQUALLY else "token-mean"
        whole = None
        if sizes is not None:
            whole = (sizes.num_sequences, sizes.num_sequences if counted is None else sizes.num_tokens)
        return counted, loss_weights(mode, values, counted, rows.weights, None, whole) * self.value_coeff

    def _weights(self, log_probs: Tensor, rows: Samples, width: int) -> Tensor | float:
        counted = mask_at(self.logprob_level, rows.mask, width)
        return loss_weights(self.aggregation, log_probs, counted, rows.weights, self.max_length)
