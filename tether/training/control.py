"""The PPO update of a control policy: passes over a rollout in mini-batches, each one optimizer step.

The losses are those of `tether.algorithms`, as for language models. Autograd sees only what lies between the outputs
of the networks and the loss; the networks' own passes are scheduled by hand (`tether.models.control.mlp`), and the
optimizer works on one flat buffer (`tether.training.flat`), since for a small network everything else is bookkeeping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from tether.algorithms import POLICY_LOSSES, Max, Mean, Metric, Min, aggregate_loss, kl_penalty, value_loss
from tether.models.control.policy import ControlPolicy
from tether.training.flat import FlatAdamW, FlatParameters
from tether.training.optimizer import OptimizerOptions, learning_rate

Level = Literal["token_level", "action_level", "chunk_level"]


@dataclass(frozen=True)
class Samples:
    """Steps to learn from. L is 1, or the width of an action at token level."""

    obs: Tensor
    """[S, O]: as the networks see them."""
    actions: Tensor
    """[S, width]"""
    old_log_probs: Tensor
    """[S, L]: under the policy that sampled."""
    advantages: Tensor
    """[S, L]"""
    values: Tensor
    """[S, 1]: of the critic at sampling."""
    returns: Tensor
    """[S, 1]"""

    def __len__(self) -> int:
        return len(self.obs)

    def at(self, rows: Tensor | slice) -> Samples:
        """Some of the rows."""
        return Samples(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class ControlLoss:
    """Policy loss, entropy bonus and value loss: one number, over whose gradient one norm is taken."""

    name: str = "vanilla"
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Keywords of the policy loss: clip ratios and the like."""
    entropy_coeff: float = 0.0
    value_coeff: float = 1.0
    cliprange_value: float | None = None
    huber_delta: float | None = None
    logprob_level: Level = "action_level"
    entropy_level: Level = "action_level"

    def __call__(
        self, policy: ControlPolicy, outputs: Tensor, values: Tensor, batch: Samples, train_policy: bool
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Loss and metrics of a mini-batch.

        Args:
            policy: whose head reads the outputs.
            outputs: of the actor, [B, outputs].
            values: of the critic, [B, 1].
            batch: the mini-batch.
            train_policy: False leaves only the value loss.
        """
        rows = len(batch)
        ones = torch.ones(rows, 1, dtype=torch.bool)
        critic = value_loss(
            values,
            batch.values,
            batch.returns,
            ones,
            cliprange_value=self.cliprange_value,
            huber_delta=self.huber_delta,
        )
        loss = self.value_coeff * aggregate_loss(critic.loss, ones, "token-mean", num_tokens=rows, num_sequences=rows)
        metrics = critic.metrics
        if train_policy:
            column_log_probs, column_entropy = policy.head.log_prob_and_entropy(outputs, batch.actions)
            log_probs = at_level(column_log_probs, self.logprob_level)
            entropy = at_level(column_entropy, self.entropy_level)
            mask = torch.ones_like(log_probs, dtype=torch.bool)
            actor = POLICY_LOSSES[self.name](log_probs, batch.old_log_probs, batch.advantages, mask, **self.options)
            share = aggregate_loss(actor.loss, mask, "token-mean", num_tokens=mask.numel(), num_sequences=rows)
            loss = loss + share - self.entropy_coeff * entropy.mean()
            everywhere = torch.ones_like(entropy, dtype=torch.bool)
            metrics = metrics | actor.metrics | {
                "actor/pg_loss": Mean.of(actor.loss, mask), "actor/entropy": Mean.of(entropy, everywhere)
            }  # fmt: skip
        return loss, metrics


@dataclass(frozen=True)
class ControlPlan:
    """How a rollout is learned from."""

    mini_batch: int
    epochs: int
    shuffle: bool = True
    """Deal samples to mini-batches in a new order each pass."""
    target_kl: float | None = None
    """No further pass once the KL from the policy that sampled is above it."""


def at_level(columns: Tensor, level: Level) -> Tensor:
    """[B, width] -> [B, width] at token level, their sum [B, 1] otherwise."""
    return columns if level == "token_level" or columns.shape[1] == 1 else columns.sum(dim=-1, keepdim=True)


class ControlLearner:
    """Trains a policy in place.

    Args:
        policy: actor and critic; its parameters become views of one buffer.
        loss: what is minimised.
        plan: passes and mini-batches.
        actor_optimizer: AdamW of everything but the critic, and its schedule.
        critic_lr: peak learning rate of the critic, which follows the same schedule.
    """

    def __init__(
        self,
        policy: ControlPolicy,
        loss: ControlLoss,
        plan: ControlPlan,
        actor_optimizer: OptimizerOptions,
        critic_lr: float,
    ) -> None:
        self.policy = policy
        self.loss = loss
        self.plan = plan
        self._options = actor_optimizer
        self._critic_share = critic_lr
        groups = [[*policy.actor.parameters(), *policy.head.parameters()], list(policy.critic.parameters())]
        self._flat = FlatParameters(groups)
        self._optimizer = FlatAdamW(
            self._flat,
            betas=actor_optimizer.betas,
            eps=actor_optimizer.eps,
            weight_decay=actor_optimizer.weight_decay,
        )

    @torch.no_grad()
    def update(
        self, samples: Samples, step: int, generator: torch.Generator, *, train_policy: bool = True
    ) -> dict[str, float]:
        """Learn from a rollout; returns metrics over all of its mini-batches.

        Args:
            samples: the rollout.
            step: number of the training step, from 0, for the schedule.
            generator: of the order of the samples.
            train_policy: False trains the critic alone.
        """
        rates = self._rates(step)
        collected: list[dict[str, Metric]] = []
        norms: list[float] = []
        epochs = skipped = 0
        while epochs < self.plan.epochs:
            epochs += 1
            if self.plan.shuffle:
                samples = samples.at(torch.randperm(len(samples), generator=generator))
            for start in range(0, len(samples), self.plan.mini_batch):
                collected.append(self.gradients(samples.at(slice(start, start + self.plan.mini_batch)), train_policy))
                norm = self._optimizer.clip_(self._options.grad_clip)
                if math.isfinite(norm):
                    norms.append(norm)
                    self._optimizer.step(rates)
                else:
                    skipped += 1
            if self.plan.target_kl is not None and train_policy and self._kl(samples) > self.plan.target_kl:
                break
        return merged(collected) | {
            "actor/grad_norm": sum(norms) / max(1, len(norms)),
            "actor/lr": rates[0],
            "critic/lr": rates[1],
            "actor/skipped_updates": float(skipped),
            "actor/epochs": float(epochs),
        }

    def gradients(self, batch: Samples, train_policy: bool = True) -> dict[str, Metric]:
        """Put the gradient of the loss of a mini-batch into every parameter's ``grad``; returns the metrics."""
        policy = self.policy
        actor_passed, critic_passed = policy.actor.activations(batch.obs), policy.critic.activations(batch.obs)
        outputs, values = actor_passed[-1].requires_grad_(), critic_passed[-1].requires_grad_()
        parameters = list(policy.head.parameters())
        with torch.enable_grad():
            loss, metrics = self.loss(policy, outputs, values, batch, train_policy)
            if train_policy:
                output_grad, value_grad, *others = torch.autograd.grad(loss, [outputs, values, *parameters])
            else:
                (value_grad,) = torch.autograd.grad(loss, [values])
        if train_policy:
            policy.actor.backward(actor_passed, output_grad)
            for parameter, grad in zip(parameters, others, strict=True):
                parameter.grad.copy_(grad)  # type: ignore[union-attr]
        else:
            self._flat.grads.zero_()
        policy.critic.backward(critic_passed, value_grad)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer; the weights are the policy's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._optimizer.load_state_dict(state)

    def _rates(self, step: int) -> list[float]:
        actor = learning_rate(self._options, step)
        return [actor, actor * self._critic_share / self._options.lr if self._options.lr else 0.0]

    def _kl(self, samples: Samples) -> float:
        """Mean KL (k3 estimate) from the policy that sampled to the current one, in nats a step."""
        columns, _ = self.policy.head.log_prob_and_entropy(
            self.policy.actor.activations(samples.obs)[-1], samples.actions
        )
        log_probs = at_level(columns, self.loss.logprob_level)
        return float(kl_penalty(samples.old_log_probs, log_probs, "k3", torch.ones_like(log_probs)).sum(dim=-1).mean())


def merged(collected: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """What `tether.algorithms.merge_metrics` gives, as numbers, with one kernel for each metric instead of one each."""
    numbers: dict[str, float] = {}
    for name, first in collected[0].items():
        pieces = [metrics[name] for metrics in collected]
        match first:
            case Mean():
                total = torch.stack([piece.total for piece in pieces]).sum()  # type: ignore[union-attr]
                count = torch.stack([piece.count for piece in pieces]).sum()  # type: ignore[union-attr]
                numbers[name] = float(Mean(total, count))
            case Max():
                numbers[name] = float(torch.stack([piece.value for piece in pieces]).max())  # type: ignore[union-attr]
            case Min():
                numbers[name] = float(torch.stack([piece.value for piece in pieces]).min())  # type: ignore[union-attr]
    return numbers
