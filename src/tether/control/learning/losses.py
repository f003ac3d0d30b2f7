"""The loss of a control policy: a plain spec with the names and coefficients of `tether.algorithms`.

Legend: B decisions, each on K actions of D columns; L and V numbers per decision, as in `chunk_levels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.algorithms import TOKEN_SELECTIONS, TokenLoss, masked_mean, merge_metrics, value_loss
from tether.batch import filled
from tether.control.learning.chunk_levels import Level, mask_at, per_column, sum_to_level
from tether.control.learning.closed_form_gradients import Draws, LossGradient, policy_gradient, value_gradient
from tether.control.learning.forward import DecisionOutputs
from tether.control.learning.samples import EPISODES_WEIGH_EQUALLY, Samples, loss_weights
from tether.loop.engine import LossSizes, LossTerm
from tether.loop.own_functions import policy_loss


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
    """The policy's loss, if its gradient needed it."""
    policy_grad_norm: Tensor | None = None
    """The norm of the gradient of the mean loss by the policy's outputs [B, outputs]; None if only the critic was
    trained. The critic's gradient is not part of it, even if the two share layers."""


@dataclass(frozen=True)
class ControlLoss:
    """L = policy loss - entropy_coeff x mean entropy + value_coeff x value loss."""

    name: str = "vanilla"
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Keyword arguments of the policy loss, such as clip ratios."""
    selection: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of the selection of elements that some losses treat differently."""
    aggregation: str = "token-mean"
    """Aggregation of the policy's losses; the critic's are weighted in the same way under ``masked_mean_ratio``."""
    max_length: float | None = None
    """Divisor of modes with ``-norm``; None divides by the elements of a row."""
    entropy_coeff: float = 0.0
    value_coeff: float = 1.0
    cliprange_value: float | None = None
    huber_delta: float | None = None
    logprob_level: Level = "action_level"
    entropy_level: Level = "action_level"
    critic_only: bool = False
    """Whether only the value loss is minimised and the policy stays unchanged."""

    def __call__(self, outputs: DecisionOutputs, samples: Samples, sizes: LossSizes) -> LossTerm:
        """Return one micro-batch's share of the loss, differentiable, as a `tether.loop.engine.LossFunction`.

        `FlatEngine` computes the same loss by its closed forms.
        """
        width = outputs.log_probs.shape[1]
        chunk = 1 if samples.mask is None else samples.mask.shape[1]
        counted = mask_at(self.logprob_level, samples.mask, width)
        log_probs = self.log_probs(outputs.log_probs, samples.mask, chunk)
        token_loss = self.token_loss(log_probs, samples, width)
        totals = (sizes.num_sequences, self._elements(self.logprob_level, sizes, width, chunk))
        weights = loss_weights(self.aggregation, log_probs, counted, samples.weights, self.max_length, totals)
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
        """Return the log-probs [B, L] at the level of the loss, from those of the columns [B, K * D]."""
        return sum_to_level(columns, self.logprob_level, chunk, mask)

    @property
    def selects(self) -> bool:
        """Whether the policy loss treats some elements differently."""
        return self.name in TOKEN_SELECTIONS

    def token_loss(self, log_probs: Tensor, rows: Samples, width: int) -> TokenLoss:
        """Return the policy's loss of each element; the arguments are those of `policy_gradient`."""
        counted = mask_at(self.logprob_level, rows.mask, width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        return policy_loss(self.name)(
            log_probs, rows.old_log_probs, rows.advantages, mask, rollout_log_probs=rows.old_log_probs,
            selected=rows.selected, **self.options,
        )  # fmt: skip

    def select(self, log_probs: Tensor, rows: Samples, width: int, draws: Draws) -> Tensor:
        """Select the elements [B, L] that the policy loss treats differently; the arguments are those of
        `policy_gradient`."""
        counted = mask_at(self.logprob_level, rows.mask, width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        choose = TOKEN_SELECTIONS[self.name]
        return choose(log_probs, rows.old_log_probs, rows.advantages, mask, generator=draws(), **self.selection)

    def policy_gradient(self, log_probs: Tensor, rows: Samples, width: int, draws: Draws) -> LossGradient:
        """Return the gradient of the policy loss by the log-probs, weighted by the aggregation.

        Args:
            log_probs: log-probs [B, L].
            rows: the mini-batch.
            width: K * D.
            draws: creates the generator for losses that choose elements at random.
        """
        counted = mask_at(self.logprob_level, rows.mask, width)
        differentiate = policy_gradient(self.name, self.options, self.selection)
        gradient = differentiate(log_probs, rows.old_log_probs, rows.advantages, counted, draws)
        return LossGradient(gradient.by_log_probs * self._weights(log_probs, rows, width), gradient.loss)

    def values_gradient(self, values: Tensor, rows: Samples) -> Tensor:
        """Return the gradient of the loss by the values, [B, V]."""
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
        """Return the gradient of the loss by the entropy of each column [B, K * D], or [1, 1] if it is the same for
        all."""
        level, (rows, width), coeff = self.entropy_level, entropy.shape, self.entropy_coeff
        if mask is None:
            columns = {"token_level": width, "action_level": chunk, "chunk_level": 1}[level]
            return entropy.new_full((1, 1), -coeff / (rows * columns))
        counted = mask_at(level, mask, width)
        elements = rows if counted is None else int(counted.sum())
        return per_column(mask, width).to(entropy.dtype) * (-coeff / elements)

    def metrics(self, rows: Samples, outputs: Sequence[Outputs], chunk: int, width: int) -> dict[str, float]:
        """Return losses and statistics of all samples, each as of its mini-batch.

        Args:
            rows: the samples, in the order of the outputs.
            outputs: outputs of each mini-batch.
            chunk: K, actions per decision.
            width: K * D.
        """
        if not outputs:
            return {}
        columns = torch.cat([output.entropy for output in outputs])
        entropy = sum_to_level(columns, self.entropy_level, chunk, rows.mask)
        counted = mask_at(self.entropy_level, rows.mask, width)
        metrics = {"actor/entropy": float(entropy.mean() if counted is None else masked_mean(entropy, counted))}
        if not self.critic_only:
            metrics |= self._policy_metrics(rows, outputs, width)
        if rows.values is None or rows.returns is None:
            return metrics
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
        return metrics | {name: float(metric) for name, metric in critic.metrics.items()}

    def _policy_metrics(self, rows: Samples, outputs: Sequence[Outputs], width: int) -> dict[str, float]:
        log_probs = torch.cat([output.log_probs for output in outputs])
        losses = [output.loss for output in outputs if output.loss is not None]
        if losses:
            loss = TokenLoss(
                torch.cat([token_loss.loss for token_loss in losses]),
                merge_metrics(token_loss.metrics for token_loss in losses),
            )
        else:
            loss = self.token_loss(log_probs, rows, width)
        metrics = {name: float(metric) for name, metric in loss.metrics.items()}
        norms = [  # root mean squares over the decisions of the gradient of each decision's loss
            float(output.policy_grad_norm) * math.sqrt(len(output.log_probs))
            for output in outputs
            if output.policy_grad_norm is not None
        ]
        return metrics | {
            "actor/pg_loss": float((loss.loss * self._weights(log_probs, rows, width)).sum()),
            "actor/policy_grad_norm": sum(norms) / len(norms),
        }

    @staticmethod
    def _elements(level: Level, sizes: LossSizes, width: int, chunk: int) -> int:
        """Return the number of elements at a level in a mini-batch of the given sizes."""
        if level == "chunk_level":
            return sizes.num_sequences
        return sizes.num_tokens * (width // chunk if level == "token_level" else 1)

    def _value_weights(
        self, values: Tensor, rows: Samples, sizes: LossSizes | None = None
    ) -> tuple[Tensor | None, Tensor | float]:
        """Return the mask of valid values [B, V] (None means all), and the weight of each in the loss.

        Args:
            values: a tensor of their shape.
            rows: the rows of the micro-batch.
            sizes: the sizes of the mini-batch; None if it consists of these rows.
        """
        counted = None if values.shape[1] == 1 else rows.mask  # one before each action, or one for the chunk
        mode = EPISODES_WEIGH_EQUALLY if self.aggregation == EPISODES_WEIGH_EQUALLY else "token-mean"
        totals = None
        if sizes is not None:
            totals = (sizes.num_sequences, sizes.num_sequences if counted is None else sizes.num_tokens)
        return counted, loss_weights(mode, values, counted, rows.weights, None, totals) * self.value_coeff

    def _weights(self, log_probs: Tensor, rows: Samples, width: int) -> Tensor | float:
        counted = mask_at(self.logprob_level, rows.mask, width)
        return loss_weights(self.aggregation, log_probs, counted, rows.weights, self.max_length)
