"""The PPO update of a control policy: passes over a rollout in mini-batches, each one optimizer step.

The losses are those of `tether.algorithms`, as for language models. For a small network on a CPU most of the time of
such an update is bookkeeping, so gradients are taken by hand (`tether.models.control`,
`tether.training.control.closed_form_gradients`) and the optimizer works on one flat buffer
(`tether.training.engines.flat_adamw`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tether.algorithms import TokenLoss, kl_penalty, masked_mean, merge_metrics, value_loss
from tether.models.control.mlp_policy import Policy
from tether.training.control.chunk_levels import Level, at_level, mask_at, per_column, to_columns
from tether.training.control.closed_form_gradients import policy_gradient, value_gradient
from tether.training.control.samples import EPISODES_ALIKE, Samples, loss_weights
from tether.training.engines.flat_adamw import FlatAdamW, FlatParameters
from tether.training.engines.incident import Incidents
from tether.training.engines.optimizer import OptimizerOptions, learning_rate
from tether.training.out_of_memory import within_memory
from tether.training.own_functions import policy_loss

Result = TypeVar("Result")
SMALLER = (
    "Lower actor_rollout_ref.actor.ppo_mini_batch_size, env.train.total_num_envs, "
    "env.train.max_steps_per_rollout_epoch or policy.hidden_dim."
)
RATE_FACTOR, RATE_BOUND = 1.5, 100.0
"""A rate that is led by the KL changes by this factor at a time, and stays within this one of the schedule's."""


@dataclass(frozen=True)
class ControlLoss:
    """L = policy loss - entropy_coeff x mean entropy + value_coeff x value loss."""

    name: str = "vanilla"
    options: Mapping[str, float | None] = field(default_factory=dict)
    """Keywords of the policy loss: clip ratios and the like."""
    selection: Mapping[str, float] = field(default_factory=dict)
    """Keywords of the choice of the elements that some losses treat apart."""
    aggregation: str = "token-mean"
    """How the policy's losses become one number; the critic's are weighed alike under ``masked_mean_ratio``."""
    max_length: float | None = None
    """Divisor of ``seq-mean-token-sum-norm``; None: the elements of a row."""
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
    """KL from the policy that sampled that is aimed at, or not to be passed."""
    lead_rate: bool = False
    """With target_kl: after each pass lower the learning rate where the KL is above twice the target, raise it where
    it is below half; else no further pass once the KL is above it."""


@dataclass(frozen=True)
class Outputs:
    """What the networks said of a mini-batch, before its step."""

    log_probs: Tensor
    """[B, L]"""
    entropy: Tensor
    """[B, K * D]"""
    values: Tensor | None
    """[B, V]"""
    loss: TokenLoss | None
    """Of the policy, where its gradient needed it."""


class ControlLearner:
    """Trains a policy in place.

    Args:
        policy: actor and critic; its parameters become views of one buffer.
        loss: what is minimised.
        plan: passes and mini-batches.
        options: AdamW and its schedule, for everything but the critic.
        critic_lr: peak learning rate of the critic, which follows the same schedule.
        incident_dir: where an update with a non-finite gradient is kept.
    """

    def __init__(
        self,
        policy: Policy,
        loss: ControlLoss,
        plan: ControlPlan,
        options: OptimizerOptions,
        critic_lr: float,
        incident_dir: Path | None = None,
    ) -> None:
        self.policy = policy
        self.loss = loss
        self.plan = plan
        self._options = options
        self._critic_lr = critic_lr
        self._incidents = Incidents(incident_dir)
        self._chunk = policy.spec.num_action_chunks
        self._rate_factor = 1.0
        self._policy_gradient = policy_gradient(loss.name, loss.options, loss.selection)
        self._flat = FlatParameters(policy.parameter_groups())
        self._optimizer = FlatAdamW(self._flat, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)

    @torch.no_grad()
    def update(
        self, samples: Samples, step: int, generator: torch.Generator, *, train_policy: bool = True
    ) -> dict[str, float]:
        """Learn from a rollout; returns the metrics of the last pass.

        Args:
            samples: the rollout; of none of them nothing is learned.
            step: number of the training step, from 0, for the schedule.
            generator: of the order of the samples.
            train_policy: False trains the critic alone.
        """
        norms: list[float] = []
        epochs = 0
        outputs: list[Outputs] = []
        while epochs < self.plan.epochs and len(samples):
            epochs += 1
            rates = self._rates(step)
            if self.plan.shuffle:
                samples = samples.shuffled(generator)
            outputs = []
            for batch in samples.split(self.plan.mini_batch):
                drawn = generator.get_state()
                outputs.append(self.gradients(batch, generator, train_policy=train_policy))
                norms.append(self._optimizer.clip_(self.plan.grad_clip))
                if math.isfinite(norms[-1]):
                    self._optimizer.step(rates)
                else:
                    skipped = SkippedMiniBatch(self.policy, self.loss, batch, drawn, train_policy=train_policy)
                    self._incidents.keep(step, self.policy, skipped)
            if self.plan.target_kl is not None and train_policy and self._far(samples, self.plan.target_kl):
                break
        finite = [norm for norm in norms if math.isfinite(norm)]
        actor_rate, critic_rate = self._rates(step)
        return self._metrics(samples, outputs, with_policy=train_policy) | {
            "actor/grad_norm": sum(finite) / max(1, len(finite)),
            "actor/skipped_updates": float(len(norms) - len(finite)),
            "actor/lr": actor_rate,
            "critic/lr": critic_rate,
            "actor/epochs": float(epochs),
        }

    def gradients(self, batch: Samples, generator: torch.Generator, *, train_policy: bool = True) -> Outputs:
        """Put the gradient of the loss of a mini-batch into every parameter's ``grad``.

        Raises:
            ValueError: it does not fit into memory, a single decision at a time.
        """
        drawn = generator.get_state()

        def attempt() -> Outputs:
            generator.set_state(drawn)
            return self._gradients(batch, generator, train_policy=train_policy)

        return policy_within_memory(self.policy, attempt, batch.old_log_probs.shape[:-1].numel())

    @torch.no_grad()
    def _gradients(self, batch: Samples, generator: torch.Generator, *, train_policy: bool) -> Outputs:
        policy, loss = self.policy, self.loss
        passed, rows = policy.run(batch.obs, batch.memory, batch.actions), batch.decisions()
        mask = rows.mask
        done = policy.head.evaluate(passed.outputs, rows.actions)
        log_probs = at_level(done.log_probs, loss.logprob_level, self._chunk, mask)
        values_grad = None if passed.values is None else self._values_gradient(passed.values, rows)
        if not train_policy:
            policy.backward(passed, None, values_grad)
            self._flat.grads[self._flat.slices[0]].zero_()
            return Outputs(log_probs, done.entropy, passed.values, None)
        counted = mask_at(loss.logprob_level, mask, policy.head.width)
        found = self._policy_gradient(log_probs, rows.old_log_probs, rows.advantages, counted, generator)
        weights = loss_weights(loss.aggregation, log_probs, counted, rows.weights, loss.max_length)
        outputs_grad = policy.head.backward(
            done,
            rows.actions,
            to_columns(found.by_log_probs * weights, policy.head.width, mask),
            self._entropy_gradient(done.entropy, mask),
        )
        policy.backward(passed, outputs_grad, values_grad)
        return Outputs(log_probs, done.entropy, passed.values, found.loss)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and the rate that is led by the KL; the weights are the policy's."""
        return self._optimizer.state_dict() | {"rate_factor": self._rate_factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._optimizer.load_state_dict(state)
        self._rate_factor = state["rate_factor"]

    def _values_gradient(self, values: Tensor, rows: Samples) -> Tensor:
        """Gradient of the loss by the values, [B, V]."""
        loss = self.loss
        assert rows.values is not None
        assert rows.returns is not None
        counted = _of_values(rows.mask, values)
        mode = EPISODES_ALIKE if loss.aggregation == EPISODES_ALIKE else "token-mean"
        weights = loss_weights(mode, values, counted, rows.weights, None)
        grad = value_gradient(
            values, rows.values, rows.returns, cliprange_value=loss.cliprange_value, huber_delta=loss.huber_delta
        )
        if counted is not None:
            grad = torch.where(counted, grad, 0.0)
        return grad * weights * loss.value_coeff

    def _entropy_gradient(self, entropy: Tensor, mask: Tensor | None) -> Tensor:
        """Gradient of the loss by the entropy of each column [B, K * D], or [1, 1] where it is the same for all."""
        level, (rows, width), coeff = self.loss.entropy_level, entropy.shape, self.loss.entropy_coeff
        if mask is None:
            columns = {"token_level": width, "action_level": self._chunk, "chunk_level": 1}[level]
            return entropy.new_full((1, 1), -coeff / (rows * columns))
        counted = mask_at(level, mask, width)
        elements = rows if counted is None else int(counted.sum())
        return per_column(mask, width).to(entropy.dtype) * (-coeff / elements)

    def _rates(self, step: int) -> list[float]:
        actor = learning_rate(self._options, step) * self._rate_factor
        return [actor, actor * self._critic_lr / self._options.lr if self._options.lr else 0.0]

    def _metrics(self, samples: Samples, outputs: list[Outputs], *, with_policy: bool) -> dict[str, float]:
        """What the losses say of all samples, each as it was when its mini-batch came."""
        if not outputs:
            return {}
        loss, samples = self.loss, samples.decisions()
        columns = torch.cat([output.entropy for output in outputs])
        entropy = at_level(columns, loss.entropy_level, self._chunk, samples.mask)
        counted = mask_at(loss.entropy_level, samples.mask, self.policy.head.width)
        found = {"actor/entropy": float(entropy.mean() if counted is None else masked_mean(entropy, counted))}
        if with_policy:
            found |= self._policy_metrics(samples, outputs)
        if samples.values is None or samples.returns is None:
            return found
        values = torch.cat([output.values for output in outputs if output.values is not None])
        counted = _of_values(samples.mask, values)
        critic = value_loss(
            values,
            samples.values,
            samples.returns,
            torch.ones_like(values, dtype=torch.bool) if counted is None else counted,
            cliprange_value=loss.cliprange_value,
            huber_delta=loss.huber_delta,
        )
        return found | {name: float(metric) for name, metric in critic.metrics.items()}

    def _policy_metrics(self, samples: Samples, outputs: list[Outputs]) -> dict[str, float]:
        log_probs = torch.cat([output.log_probs for output in outputs])
        counted = mask_at(self.loss.logprob_level, samples.mask, self.policy.head.width)
        known = [output.loss for output in outputs if output.loss is not None]
        if known:
            loss = TokenLoss(
                torch.cat([piece.loss for piece in known]), merge_metrics(piece.metrics for piece in known)
            )
        else:
            mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
            loss = policy_loss(self.loss.name)(
                log_probs, samples.old_log_probs, samples.advantages, mask, **self.loss.options
            )
        weights = loss_weights(self.loss.aggregation, log_probs, counted, samples.weights, self.loss.max_length)
        found = {name: float(metric) for name, metric in loss.metrics.items()}
        return found | {"actor/pg_loss": float((loss.loss * weights).sum())}

    def _far(self, samples: Samples, target: float) -> bool:
        """Measure the KL from the policy that sampled; says whether the passes end, or leads the learning rate."""
        kl = self._kl(samples)
        if not self.plan.lead_rate:
            return kl > target
        if kl > 2 * target:
            self._rate_factor = max(self._rate_factor / RATE_FACTOR, 1 / RATE_BOUND)
        elif kl < target / 2:
            self._rate_factor = min(self._rate_factor * RATE_FACTOR, RATE_BOUND)
        return False

    def _kl(self, samples: Samples) -> float:
        """Mean KL (k3 estimate) from the policy that sampled to the current one, in nats a decision."""
        rows = samples.old_log_probs.shape[:-1].numel()
        outputs = policy_within_memory(
            self.policy, lambda: self.policy.outputs(samples.obs, samples.memory, samples.actions), rows
        )
        samples = samples.decisions()
        columns = self.policy.head.evaluate(outputs, samples.actions).log_probs
        log_probs = at_level(columns, self.loss.logprob_level, self._chunk, samples.mask)
        counted = mask_at(self.loss.logprob_level, samples.mask, self.policy.head.width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        estimate = kl_penalty(samples.old_log_probs, log_probs, "k3", mask)
        return float(estimate.sum(dim=-1).mean())


class SkippedMiniBatch:
    """See `tether.training.engines.incident.SkippedUpdate`.

    Args:
        policy: that said what has no finite gradient.
        loss: what was minimised.
        samples: the mini-batch.
        drawn: state of the generator of draws before it.
        train_policy: False: of the critic alone.
    """

    def __init__(
        self, policy: Policy, loss: ControlLoss, samples: Samples, drawn: Tensor, *, train_policy: bool
    ) -> None:
        self._policy, self._loss, self._samples, self._drawn = policy, loss, samples, drawn
        self._train_policy = train_policy

    def __len__(self) -> int:
        """Decisions, or sequences."""
        return len(self._samples)

    def backward(self, row: int) -> Tensor:
        """See there."""
        samples = self._samples.each(lambda column: column[row : row + 1])
        generator = torch.Generator()
        generator.set_state(self._drawn)
        said = [self._learner.gradients(samples, generator, train_policy=self._train_policy)]
        found, loss = self._learner._metrics(samples, said, with_policy=self._train_policy), self._loss
        policy = found.get("actor/pg_loss", 0.0) - loss.entropy_coeff * found["actor/entropy"]
        return torch.tensor(policy + loss.value_coeff * found.get("critic/vf_loss", 0.0))

    @cached_property
    def _learner(self) -> ControlLearner:
        return ControlLearner(self._policy, self._loss, ControlPlan(1, 1), OptimizerOptions(lr=0.0), 0.0)


def policy_within_memory(policy: Policy, attempt: Callable[[], Result], rows: int) -> Result:
    """Do something with a policy, in smaller micro-batches where it does not fit into memory.

    Args:
        policy: its `micro_batch` is lowered where that is needed.
        attempt: what to do.
        rows: decisions of a micro-batch, where the policy has no limit.

    Raises:
        ValueError: it does not fit, a single decision at a time.
    """

    def try_with(limit: int | None) -> Result:
        policy.micro_batch = limit
        return attempt()

    result, policy.micro_batch = within_memory(
        try_with,
        policy.micro_batch,
        lambda limit: None if limit == 1 else (limit or rows) // 2 or 1,
        lambda limit: f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={limit}",
        SMALLER,
    )
    return result


def _of_values(mask: Tensor | None, values: Tensor) -> Tensor | None:
    """The mask of values [B, V]: one before each action of a chunk, or one of the chunk, which always counts."""
    return None if mask is None or values.shape[1] == 1 else mask
