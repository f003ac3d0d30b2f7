"""`FlatEngine` with the gradients of autograd: the definition that its closed forms are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tether.algorithms import TOKEN_SELECTIONS, TokenLoss, value_loss
from tether.batch import filled
from tether.control.learning.flat import FlatEngine
from tether.control.learning.losses import (
    EPISODES_WEIGH_EQUALLY,
    ControlLoss,
    Draws,
    Outputs,
    Samples,
    loss_weights,
    mask_at,
    sum_to_level,
)
from tether.control.policies.mlp_policy import Policy
from tether.loop.own_functions import policy_loss


@dataclass(frozen=True)
class DecisionOutputs:
    """A policy's outputs for B decisions on K actions of D columns, differentiable."""

    outputs: Tensor
    """[B, outputs of the head]: the inputs of its distribution."""
    log_probs: Tensor
    """[B, K * D]"""
    entropy: Tensor
    """[B, K * D]"""
    values: Tensor | None
    """[B, V]; None without a critic."""


def decision_outputs(policy: Policy, samples: Samples) -> DecisionOutputs:
    """Return the outputs for the decisions of `samples`; for sequences, for the selected decisions."""
    outputs, values = policy.decide(samples.obs, samples.memory, samples.actions)
    done = policy.head.evaluate(outputs, samples.decisions().actions)
    return DecisionOutputs(outputs, done.log_probs, done.entropy, values)


def weights_of(loss: ControlLoss, rows: Samples, width: int, chunk: int) -> list[Tensor]:
    """Return the weights of all policy losses, entropies and value losses of a mini-batch, before it is split."""

    def mean(mode: str, like: Tensor, counted: Tensor | None, max_length: float | None = None) -> Tensor:
        return torch.ones_like(like) * loss_weights(mode, like, counted, rows.weights, max_length)

    policy = mean(loss.aggregation, rows.old_log_probs, mask_at(loss.logprob_level, rows.mask, width), loss.max_length)
    columns = sum_to_level(rows.old_log_probs.new_zeros(len(rows.actions), width), loss.entropy_level, chunk)
    entropy = mean("token-mean", columns, mask_at(loss.entropy_level, rows.mask, width))
    if rows.values is None:
        return [policy, entropy]
    mode = EPISODES_WEIGH_EQUALLY if loss.aggregation == EPISODES_WEIGH_EQUALLY else "token-mean"
    return [policy, entropy, mean(mode, rows.values, None if rows.values.shape[1] == 1 else rows.mask)]


def token_loss(loss: ControlLoss, log_probs: Tensor, rows: Samples, width: int, selected: Tensor | None) -> TokenLoss:
    """Return the policy's loss of each element, of which the selected ones are treated differently."""
    counted = mask_at(loss.logprob_level, rows.mask, width)
    mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
    old = rows.old_log_probs
    return policy_loss(loss.name)(
        log_probs, old, rows.advantages, mask, rollout_log_probs=old, selected=selected, **loss.options
    )


def differentiable_loss(
    loss: ControlLoss,
    outputs: DecisionOutputs,
    samples: Samples,
    weights: list[Tensor],
    selected: Tensor | None,
    chunk: int,
) -> Tensor:
    """Return L = policy loss - entropy_coeff x mean entropy + value_coeff x value loss of one micro-batch."""
    width = outputs.log_probs.shape[1]
    log_probs = loss.log_probs(outputs.log_probs, samples.mask, chunk)
    policy = token_loss(loss, log_probs, samples, width, selected).loss
    entropy = sum_to_level(outputs.entropy, loss.entropy_level, chunk, samples.mask)
    total = (policy * weights[0]).sum() - loss.entropy_coeff * (entropy * weights[1]).sum()
    if loss.critic_only:
        total = torch.zeros_like(total)
    if outputs.values is not None:
        valid = samples.mask if samples.mask is not None and outputs.values.shape[1] > 1 else None
        critic = value_loss(
            outputs.values, filled(samples.values), filled(samples.returns),
            torch.ones_like(outputs.values, dtype=torch.bool) if valid is None else valid,
            cliprange_value=loss.cliprange_value, huber_delta=loss.huber_delta,
        )  # fmt: skip
        total = total + loss.value_coeff * (critic.loss * weights[2]).sum()
    return total


class FlatAutogradEngine(FlatEngine):
    """Owns and trains a control policy of any kind; see `FlatEngine`, which is faster and gives the same gradient."""

    def _preallocated(self, mini: Samples, loss: ControlLoss) -> None:
        return None

    def _gradients(self, mini: Samples, loss: ControlLoss, draws: Draws) -> Outputs:
        rows, width = mini.decisions(), self.policy.head.width
        weights = weights_of(loss, rows, width, self._chunk)
        pieces = list(mini.split(self._decisions_at_once(mini)))
        selected = self._selected(pieces, rows, loss, draws)
        self._flat.grads.zero_()
        said, first = [], 0
        for piece in pieces:
            with torch.enable_grad():
                found = decision_outputs(self.policy, piece)
                found.outputs.retain_grad()
                count = len(found.log_probs)
                mine = slice(first, first + count)
                chosen = None if selected is None else selected[mine]
                own = [weight[mine] for weight in weights]
                differentiable_loss(loss, found, piece.decisions(), own, chosen, self._chunk).backward()
            first += count
            said.append(found)
        if loss.critic_only:
            self._flat.grads[self._flat.slices[0]].zero_()
        values = [found.values.detach() for found in said if found.values is not None]
        log_probs = loss.log_probs(torch.cat([found.log_probs.detach() for found in said]), rows.mask, self._chunk)
        entropy = torch.cat([found.entropy.detach() for found in said])
        outputs = Outputs(log_probs, entropy, torch.cat(values) if values else None, None)
        if loss.critic_only:
            return outputs
        by_outputs = torch.cat([found.outputs.grad for found in said if found.outputs.grad is not None])
        norm = torch.linalg.vector_norm(by_outputs)
        return replace(outputs, loss=token_loss(loss, log_probs, rows, width, selected), policy_grad_norm=norm)

    def _decisions_at_once(self, mini: Samples) -> int:
        of_each = 1 if mini.memory is None else mini.memory.selected.shape[1]
        return max(of_each, self.policy.micro_batch or len(mini) * of_each)

    def _selected(self, pieces: list[Samples], rows: Samples, loss: ControlLoss, draws: Draws) -> Tensor | None:
        """The tokens that the loss treats apart, chosen over all micro-batches."""
        if loss.critic_only or loss.name not in TOKEN_SELECTIONS:
            return None
        columns = torch.cat([decision_outputs(self.policy, piece).log_probs for piece in pieces])
        log_probs = loss.log_probs(columns, rows.mask, self._chunk)
        counted = mask_at(loss.logprob_level, rows.mask, self.policy.head.width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        choose = TOKEN_SELECTIONS[loss.name]
        return choose(log_probs, rows.old_log_probs, rows.advantages, mask, generator=draws(), **loss.selection)
