"""The PPO update of a control policy: passes over a rollout in mini-batches, each one optimizer step.

The losses are those of `tether.algorithms`, as for language models. For a small network on a CPU most of the time of
such an update is bookkeeping, so gradients are taken by hand (`tether.models.control`,
`tether.training.loss_gradients`) and the optimizer works on one flat buffer (`tether.training.flat`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from tether.algorithms import POLICY_LOSSES, kl_penalty, value_loss
from tether.models.control.policy import ControlPolicy
from tether.training.flat import FlatAdamW, FlatParameters
from tether.training.loss_gradients import policy_gradient, value_gradient
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

    def shuffled(self, generator: torch.Generator) -> Samples:
        """The same rows in a random order."""
        order = torch.randperm(len(self), generator=generator)
        return Samples(*(getattr(self, field.name).index_select(0, order) for field in fields(self)))

    def split(self, size: int) -> Iterator[Samples]:
        """Pieces of `size` rows, the last one of what is left."""
        pieces = (getattr(self, field.name).split(size) for field in fields(self))
        return (Samples(*piece) for piece in zip(*pieces, strict=True))


@dataclass(frozen=True)
class ControlLoss:
    """L = mean policy loss - entropy_coeff x mean entropy + value_coeff x mean value loss."""

    name: str = "vanilla"
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Keywords of the policy loss: clip ratios and the like."""
    entropy_coeff: float = 0.0
    value_coeff: float = 1.0
    cliprange_value: float | None = None
    huber_delta: float | None = None
    logprob_level: Level = "action_level"
    entropy_level: Level = "action_level"


@dataclass(frozen=True)
class ControlPlan:
    """How a rollout is learned from."""

    mini_batch: int
    epochs: int
    shuffle: bool = True
    """Deal samples to mini-batches in a new order each pass."""
    grad_clip: float = 0.5
    """Norm over all gradients, actor and critic together, down to which they are scaled."""
    target_kl: float | None = None
    """No further pass once the KL from the policy that sampled is above it."""


@dataclass(frozen=True)
class Outputs:
    """What the networks said of a mini-batch, before its step."""

    log_probs: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, width]"""
    values: Tensor
    """[B, 1]"""


def at_level(columns: Tensor, level: Level) -> Tensor:
    """[B, width] -> [B, width] at token level, their sum [B, 1] otherwise."""
    return columns if level == "token_level" or columns.shape[1] == 1 else columns.sum(dim=-1, keepdim=True)


class ControlLearner:
    """Trains a policy in place.

    Args:
        policy: actor and critic; its parameters become views of one buffer.
        loss: what is minimised.
        plan: passes and mini-batches.
        options: AdamW and its schedule, for everything but the critic.
        critic_lr: peak learning rate of the critic, which follows the same schedule.
    """

    def __init__(
        self, policy: ControlPolicy, loss: ControlLoss, plan: ControlPlan, options: OptimizerOptions, critic_lr: float
    ) -> None:
        self.policy = policy
        self.loss = loss
        self.plan = plan
        self._options = options
        self._critic_lr = critic_lr
        self._policy_gradient = policy_gradient(loss.name, loss.options)
        groups = [[*policy.actor.parameters(), *policy.head.parameters()], list(policy.critic.parameters())]
        self._flat = FlatParameters(groups)
        self._optimizer = FlatAdamW(self._flat, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)

    @torch.no_grad()
    def update(
        self, samples: Samples, step: int, generator: torch.Generator, *, train_policy: bool = True
    ) -> dict[str, float]:
        """Learn from a rollout; returns the metrics of the last pass.

        Args:
            samples: the rollout.
            step: number of the training step, from 0, for the schedule.
            generator: of the order of the samples.
            train_policy: False trains the critic alone.
        """
        rates = self._rates(step)
        norms: list[float] = []
        epochs = 0
        while epochs < self.plan.epochs:
            epochs += 1
            if self.plan.shuffle:
                samples = samples.shuffled(generator)
            outputs = []
            for batch in samples.split(self.plan.mini_batch):
                outputs.append(self.gradients(batch, train_policy=train_policy))
                norms.append(self._optimizer.clip_(self.plan.grad_clip))
                if math.isfinite(norms[-1]):
                    self._optimizer.step(rates)
            if self.plan.target_kl is not None and train_policy and self._kl(samples) > self.plan.target_kl:
                break
        finite = [norm for norm in norms if math.isfinite(norm)]
        return self._metrics(samples, outputs) | {
            "actor/grad_norm": sum(finite) / max(1, len(finite)),
            "actor/skipped_updates": float(len(norms) - len(finite)),
            "actor/lr": rates[0],
            "critic/lr": rates[1],
            "actor/epochs": float(epochs),
        }

    @torch.no_grad()
    def gradients(self, batch: Samples, *, train_policy: bool = True) -> Outputs:
        """Put the gradient of the loss of a mini-batch into every parameter's ``grad``."""
        policy, loss, rows = self.policy, self.loss, len(batch)
        passed = policy.actor.activations(batch.obs)
        done = policy.head.evaluate(passed[-1], batch.actions)
        log_probs = at_level(done.log_probs, loss.logprob_level)
        if train_policy:
            log_prob_grad = self._policy_gradient(log_probs, batch.old_log_probs, batch.advantages)
            columns = policy.head.width if loss.entropy_level == "token_level" else 1
            output_grad = policy.head.backward(
                done, batch.actions, log_prob_grad / log_prob_grad.numel(), -loss.entropy_coeff / (rows * columns)
            )
            policy.actor.backward(passed, output_grad)
        else:
            self._flat.grads.zero_()
        passed = policy.critic.activations(batch.obs)
        value_grad = value_gradient(
            passed[-1],
            batch.values,
            batch.returns,
            cliprange_value=loss.cliprange_value,
            huber_delta=loss.huber_delta,
        )
        policy.critic.backward(passed, value_grad * (loss.value_coeff / rows))
        return Outputs(log_probs, done.entropy, passed[-1])

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer; the weights are the policy's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._optimizer.load_state_dict(state)

    def _rates(self, step: int) -> list[float]:
        actor = learning_rate(self._options, step)
        return [actor, actor * self._critic_lr / self._options.lr if self._options.lr else 0.0]

    def _metrics(self, samples: Samples, outputs: list[Outputs]) -> dict[str, float]:
        """What the losses say of all samples, each as it was when its mini-batch came."""
        log_probs = torch.cat([output.log_probs for output in outputs])
        values = torch.cat([output.values for output in outputs])
        entropy = torch.cat([at_level(output.entropy, self.loss.entropy_level) for output in outputs])
        mask = torch.ones_like(log_probs, dtype=torch.bool)
        actor = POLICY_LOSSES[self.loss.name](
            log_probs, samples.old_log_probs, samples.advantages, mask, **self.loss.options
        )
        critic = value_loss(
            values,
            samples.values,
            samples.returns,
            torch.ones_like(values, dtype=torch.bool),
            cliprange_value=self.loss.cliprange_value,
            huber_delta=self.loss.huber_delta,
        )
        found = {name: float(metric) for name, metric in (actor.metrics | critic.metrics).items()}
        return found | {"actor/pg_loss": float(actor.loss.mean()), "actor/entropy": float(entropy.mean())}

    def _kl(self, samples: Samples) -> float:
        """Mean KL (k3 estimate) from the policy that sampled to the current one, in nats a step."""
        outputs = self.policy.actor.activations(samples.obs)[-1]
        log_probs = at_level(self.policy.head.evaluate(outputs, samples.actions).log_probs, self.loss.logprob_level)
        estimate = kl_penalty(samples.old_log_probs, log_probs, "k3", torch.ones_like(log_probs))
        return float(estimate.sum(dim=-1).mean())
