"""The `tether.loop.engine.Engine` of control policies, with gradients in closed form.

For a small network on a CPU, most of the time of an update is overhead. So gradients are computed in closed form
(`tether.control.policies`, `tether.control.learning.losses`), and AdamW works on one flat buffer of all parameters,
with a handful of kernels per step. Actor and critic are updated together, because they may share layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from tether.algorithms import kl_penalty
from tether.batch import EnvBatch, WeightUpdate
from tether.checkpoints import load_state, save_state
from tether.config.schema import OptimConfig
from tether.control.learning.losses import ControlLoss, Draws, Outputs, RolloutOutputs, Samples, mask_at, to_columns
from tether.control.learning.preallocated import PreallocatedGradients
from tether.control.policies.mlp_policy import Policy, save_policy
from tether.control.policies.networks import device_of
from tether.loop.engine import (
    CHECKED_BYTES,
    AnyLoss,
    Forward,
    OptimizerOptions,
    UpdatePlan,
    UpdateResult,
    learning_rate,
    retry_with_smaller_limit,
)
from tether.loop.incident import Incidents
from tether.loop.run import optimizer_options
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.runtime.machine import deterministic_kernels
from tether.types import StateDict


class FlatParameters:
    """Moves all parameters into one vector and their gradients into another, and makes them views of these.

    Parameters that compute in a narrower format have separate memory: after each update they are rounded from the
    vector, and each of their gradients is added to the gradient vector as soon as it is complete, so that micro-batches
    accumulate in float32.

    Args:
        groups: groups of the trained parameters.
        narrow: parameters that compute in a narrower format, trained or not.
        dtype: the narrower format.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        narrow: Sequence[nn.Parameter] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        parameters = [parameter for group in groups for parameter in group]
        self.values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.grads = torch.zeros_like(self.values)
        self._narrow, narrowed = list(narrow), set(narrow)
        self._masters: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for parameter in parameters:
            span = slice(offset, offset + parameter.numel())
            value, grad = self.values[span].view_as(parameter), self.grads[span].view_as(parameter)
            if parameter in narrowed:
                self._masters[parameter] = value
                parameter.register_post_accumulate_grad_hook(_adding_to(grad))
            else:
                parameter.data, parameter.grad = value, grad
            offset = span.stop
        for parameter in narrow:
            parameter.data = parameter.data.to(dtype)
        sizes = [sum(parameter.numel() for parameter in group) for group in groups]
        bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self.slices = [slice(start, stop) for start, stop in pairwise(bounds)]

    def begin_gradients(self) -> None:
        """Set the gradients to zero if they are accumulated; otherwise the backward pass overwrites them."""
        if self._masters:
            self.grads.zero_()

    def finish_update(self) -> None:
        """Copy the updated vector to the parameters of a narrower format, rounded."""
        for parameter, master in self._masters.items():
            parameter.data.copy_(master)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Give all parameters their float32 values inside the context, for saving."""
        rounded = [(parameter, parameter.data) for parameter in self._narrow]
        for parameter, data in rounded:
            parameter.data = self._masters.get(parameter, data).float()
        try:
            yield
        finally:
            for parameter, data in rounded:
                parameter.data = data


def _adding_to(total: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a gradient to `total` and frees it; the hook holds no reference to its parameter."""

    def add(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        total.add_(gradient)

    return add


class FlatAdamW:
    """AdamW (Loshchilov and Hutter 2019) over `FlatParameters`, equal to ``torch.optim.AdamW``."""

    def __init__(
        self, parameters: FlatParameters, *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.parameters = parameters
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._first = torch.zeros_like(parameters.values)
        self._second = torch.zeros_like(parameters.values)
        self._denominator = torch.zeros_like(parameters.values)
        self._steps = 0

    def clip_(self, max_norm: float) -> float:
        """Scale all gradients down to a norm of at most `max_norm`, and return their norm before scaling."""
        norm = float(torch.linalg.vector_norm(self.parameters.grads))
        if norm > max_norm:
            self.parameters.grads.mul_(max_norm / (norm + 1e-6))
        return norm

    def step(self, rates: Sequence[float]) -> None:
        """Update the parameters from the gradients, with a learning rate for each group."""
        self._steps += 1
        (beta1, beta2), grads = self._betas, self.parameters.grads
        self._first.lerp_(grads, 1 - beta1)
        self._second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        torch.sqrt(self._second, out=self._denominator)
        self._denominator.mul_((1 - beta2**self._steps) ** -0.5).add_(self._eps)
        for rate, value, first, denominator in self._groups(rates):
            if self._weight_decay:
                value.mul_(1 - rate * self._weight_decay)
            value.addcdiv_(first, denominator, value=-rate / (1 - beta1**self._steps))
        self.parameters.finish_update()

    def state_dict(self) -> StateDict:
        return {"first": self._first.clone(), "second": self._second.clone(), "steps": self._steps}

    def load_state_dict(self, state: StateDict) -> None:
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])
        self._steps = int(state["steps"])

    def _groups(self, rates: Sequence[float]) -> list[tuple[float, Tensor, Tensor, Tensor]]:
        """Return rate, values, first moments and denominators of each group, or of all together if rates are equal."""
        values, first, denominator = self.parameters.values, self._first, self._denominator
        if len(set(rates)) == 1:
            return [(rates[0], values, first, denominator)]
        groups = zip(rates, self.parameters.slices, strict=True)
        return [(rate, values[span], first[span], denominator[span]) for rate, span in groups]


Result = TypeVar("Result")
SMALLER = (
    "Lower actor_rollout_ref.actor.ppo_mini_batch_size, env.train.total_num_envs, "
    "env.train.max_steps_per_rollout_epoch or policy.hidden_dim."
)
RATE_FACTOR, RATE_BOUND = 1.5, 100.0
"""A learning rate that adapts to the KL is multiplied or divided by the first number, and differs from the schedule by
at most the second factor."""


class FlatEngine:
    """Owns and trains a control policy.

    Args:
        policy: the actor and critic, whose parameters become views of one buffer.
        options: AdamW and its schedule, for everything except the critic.
        critic_lr: peak learning rate of the critic, which follows the same schedule.
        incident_dir: folder for mini-batches with a non-finite gradient.
    """

    def __init__(
        self, policy: Policy, options: OptimizerOptions, critic_lr: float, incident_dir: Path | None = None
    ) -> None:
        self.policy, self._device = policy, device_of(policy)
        self.version = 0
        self._options = options
        self._critic_lr = critic_lr
        self._incidents = Incidents(incident_dir)
        self._chunk = policy.spec.num_action_chunks
        self._rate_factor = 1.0
        self._flat = FlatParameters(policy.parameter_groups(), policy.narrow_parameters(), torch.bfloat16)
        self._optimizer = FlatAdamW(self._flat, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)

    @classmethod
    def from_config(
        cls, policy: Policy, actor: OptimConfig, critic: OptimConfig, total_steps: int, incidents: Path
    ) -> Self:
        """Return the engine of a policy, with the optimizer of ``actor.optim`` and the rate of ``critic.optim``."""
        return cls(policy, optimizer_options(actor, total_steps), critic.lr, incidents)

    def infer(self, batch: EnvBatch, forward: Forward[Any, RolloutOutputs]) -> RolloutOutputs:
        """Run a forward pass over a rollout, as `Engine.infer` describes.

        Raises:
            ValueError: the pass does not fit into memory, even one decision at a time.
        """
        rows = batch.actions.shape[:2].numel()
        with deterministic_kernels():  # as in the update, so that ratios are 1 before its first step
            return self._retry_if_out_of_memory(lambda: forward(self.policy, batch, None), rows)

    @torch.no_grad()
    def update(self, batch: Samples, loss: AnyLoss, plan: UpdatePlan, step: int) -> UpdateResult[RolloutOutputs]:
        """Update the policy as `Engine.update` describes; metrics are of the last epoch. An empty batch changes
        nothing."""
        self.version += 1
        function = loss.function
        assert isinstance(function, ControlLoss)
        norms: list[float] = []
        outputs: list[Outputs] = []
        epochs = 0
        samples = batch = batch.to(self._device)
        preallocated: dict[int, PreallocatedGradients | None] = {}  # by number of rows
        while epochs < plan.epochs and len(samples):
            rates = self._rates(step)
            if plan.shuffle:
                order = plan.order(len(samples), step, epochs).to(self._device)
                samples = batch.each(lambda column: column[order])  # noqa: B023  (called at once)
            outputs = []
            for number, mini in enumerate(samples.split(plan.mini_batch_rows)):
                draws = partial(plan.generator, step, epochs, number)
                if len(mini) not in preallocated:
                    preallocated[len(mini)] = self._preallocated(mini, function)
                faster = preallocated[len(mini)]
                outputs.append(self.gradients(mini, function, draws) if faster is None else faster(mini))
                norms.append(self._optimizer.clip_(self._options.grad_clip))
                if math.isfinite(norms[-1]):
                    self._optimizer.step(rates)
                else:
                    self._keep_incident(step, function, mini, draws)
            epochs += 1
            if plan.target_kl is not None and not function.critic_only and self._should_stop(samples, function, plan):
                break
        if batch.observed is not None:  # after the update, because sampling and training must use the same statistics
            self.policy.update_statistics(batch.observed.to(self._device))
        finite = [norm for norm in norms if math.isfinite(norm)]
        actor_rate, critic_rate = self._rates(step)
        metrics = function.metrics(samples.decisions(), outputs, self._chunk, self.policy.head.width) | {
            "actor/grad_norm": sum(finite) / len(finite) if finite else math.nan,
            "actor/skipped_updates": float(len(norms) - len(finite)),
            "actor/lr": actor_rate,
            "critic/lr": critic_rate,
            "actor/epochs": float(epochs),
        }
        return UpdateResult(metrics)

    def gradients(self, mini: Samples, loss: ControlLoss, draws: Draws = torch.Generator) -> Outputs:
        """Compute the gradient of a mini-batch's loss in every parameter's ``grad``.

        Args:
            mini: the mini-batch.
            loss: the loss to minimise.
            draws: creates the generator for losses that choose elements at random.

        Raises:
            ValueError: the mini-batch does not fit into memory, even one decision at a time.
        """
        rows = mini.old_log_probs.shape[:-1].numel()
        with deterministic_kernels():
            return self._retry_if_out_of_memory(lambda: self._gradients(mini, loss, draws), rows)

    @torch.no_grad()
    def _gradients(self, mini: Samples, loss: ControlLoss, draws: Draws) -> Outputs:
        policy, rows, mine = self.policy, mini.decisions(), self._select_local(mini)
        passed = policy.run(mine.obs, mine.memory, mine.actions)
        decided = mine.decisions()
        done = policy.head.evaluate(passed.outputs, decided.actions)
        log_probs = self._gather_values(mini, loss.log_probs(done.log_probs, decided.mask, self._chunk))
        entropy = self._gather_values(mini, done.entropy)
        values, values_grad = None, None
        if passed.values is not None:
            values = self._gather_values(mini, passed.values)
            values_grad = self._local_values(mini, loss.values_gradient(values, rows))
        self._flat.begin_gradients()
        if loss.critic_only:
            policy.backward(passed, None, values_grad)
            self._flat.grads[self._flat.slices[0]].zero_()
            self._finish_gradients()
            return Outputs(log_probs, entropy, values, None)
        gradient = loss.policy_gradient(log_probs, rows, policy.head.width, draws)
        outputs_grad = policy.head.backward(
            done,
            decided.actions,
            self._local_values(mini, to_columns(gradient.by_log_probs, policy.head.width, rows.mask)),
            self._local_values(mini, loss.entropy_gradient(entropy, rows.mask, self._chunk)),
        )
        policy.backward(passed, outputs_grad, values_grad)
        self._finish_gradients()
        return Outputs(log_probs, entropy, values, gradient.loss, self._global_norm(outputs_grad))

    def _preallocated(self, mini: Samples, loss: ControlLoss) -> PreallocatedGradients | None:
        """Return a faster implementation of `gradients` for mini-batches of this size; None if none applies."""
        return PreallocatedGradients.of(self.policy, loss, mini)

    def _retry_if_out_of_memory(self, attempt: Callable[[], Result], rows: int) -> Result:
        return retry_with_smaller_micro_batches(self.policy, attempt, rows)

    def _select_local(self, rows: Samples) -> Samples:
        """Return the rows whose decisions this engine computes, with their observations."""
        return rows

    def _gather_values(self, rows: Samples, values: Tensor) -> Tensor:
        """Gather values of the decisions of all rows from those of `_select_local`."""
        return values

    def _local_values(self, rows: Samples, values: Tensor) -> Tensor:
        """Select this engine's rows, the inverse of `_gather_values`; a single row that broadcasts is unchanged."""
        return values

    def _finish_gradients(self) -> None:
        """Reduce the gradients over all rows."""

    def _global_norm(self, matrix: Tensor) -> Tensor:
        """Return the norm of a matrix with one row per decision, over all rows."""
        return torch.linalg.vector_norm(matrix)

    def _keep_incident(self, step: int, loss: ControlLoss, mini: Samples, draws: Draws) -> None:
        self._incidents.keep(step, self.policy, SkippedControlMiniBatch(self.policy, loss, mini, draws))

    def export(self) -> WeightUpdate:
        return WeightUpdate(self.version, self.policy.state_dict(keep_vars=True).items())

    def save(self, folder: Path) -> None:
        """Write the policy's spec as JSON and its weights as safetensors, in float32."""
        with self._flat.in_float32():
            save_policy(self.policy, folder)

    def check_saving(self, folder: Path) -> None:
        """Write the policy as `save` does, to see that it can be saved; large policies are not written."""
        if sum(value.nbytes for value in self.policy.parameters()) <= CHECKED_BYTES:
            self.save(folder)

    def state_dict(self) -> StateDict:
        """Return the state of the optimizer, the version and the adapted learning rate, without the weights."""
        return self._optimizer.state_dict() | {"rate_factor": self._rate_factor, "version": self.version}

    def load_state_dict(self, state: StateDict) -> None:
        self._optimizer.load_state_dict(state)
        self._rate_factor, self.version = float(state["rate_factor"]), int(state["version"])

    def saving(self, folder: Path, state: Path | None, *, copy: bool) -> Callable[[], None]:
        policy, training_state = self.policy, self.state_dict()
        if copy:
            with self._flat.in_float32():
                policy, training_state = deepcopy((policy, training_state))

        def write() -> None:
            with nullcontext() if copy else self._flat.in_float32():
                save_policy(policy, folder)
            if state:
                save_state(state, training_state)

        return write

    def load_state(self, file: Path) -> None:
        with reading(file, ANOTHER_CHECKPOINT):
            self.load_state_dict(load_state(file))

    def _rates(self, step: int) -> list[float]:
        actor = learning_rate(self._options, step) * self._rate_factor
        return [actor, actor * self._critic_lr / self._options.lr if self._options.lr else 0.0]

    def _should_stop(self, samples: Samples, loss: ControlLoss, plan: UpdatePlan) -> bool:
        """Return whether to stop the epochs because the KL from the sampling policy is too large. If the learning rate
        adapts to the KL instead, adapt it."""
        assert plan.target_kl is not None
        kl, target = self._kl(samples, loss), plan.target_kl
        if not plan.adapts_lr:
            return kl > target
        if kl > 2 * target:
            self._rate_factor = max(self._rate_factor / RATE_FACTOR, 1 / RATE_BOUND)
        elif kl < target / 2:
            self._rate_factor = min(self._rate_factor * RATE_FACTOR, RATE_BOUND)
        return False

    def _kl(self, samples: Samples, loss: ControlLoss) -> float:
        """Return the mean KL (k3 estimate) from the sampling policy to the current one, in nats per decision."""
        rows = samples.old_log_probs.shape[:-1].numel()
        mine = self._select_local(samples)
        outputs = self._retry_if_out_of_memory(lambda: self.policy.outputs(mine.obs, mine.memory, mine.actions), rows)
        decided = mine.decisions()
        columns = self.policy.head.evaluate(outputs, decided.actions).log_probs
        log_probs = self._gather_values(samples, loss.log_probs(columns, decided.mask, self._chunk))
        samples = samples.decisions()
        counted = mask_at(loss.logprob_level, samples.mask, self.policy.head.width)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if counted is None else counted
        estimate = kl_penalty(samples.old_log_probs, log_probs, "k3", mask)
        return float(estimate.sum(dim=-1).mean())


class SkippedControlMiniBatch:
    """A mini-batch of a control policy, as a `tether.loop.incident.SkippedUpdate`.

    Args:
        policy: the policy whose gradient was not finite.
        loss: the loss.
        samples: the mini-batch.
        draws: creates the generator for losses that choose elements at random.
    """

    def __init__(self, policy: Policy, loss: ControlLoss, samples: Samples, draws: Draws) -> None:
        self._policy, self._loss, self._samples, self._draws = policy, loss, samples, draws

    def __len__(self) -> int:
        return len(self._samples)

    def backward(self, row: int) -> Tensor:
        samples, loss = self._samples.each(lambda column: column[row : row + 1]), self._loss
        outputs = [self._engine.gradients(samples, loss, self._draws)]
        spec = self._policy.spec
        metrics = loss.metrics(samples.decisions(), outputs, spec.num_action_chunks, self._policy.head.width)
        policy = metrics.get("actor/pg_loss", 0.0) - loss.entropy_coeff * metrics["actor/entropy"]
        return torch.tensor(policy + loss.value_coeff * metrics.get("critic/vf_loss", 0.0))

    @cached_property
    def _engine(self) -> FlatEngine:
        return FlatEngine(self._policy, OptimizerOptions(lr=0.0), critic_lr=0.0)


def retry_with_smaller_micro_batches(policy: Policy, attempt: Callable[[], Result], rows: int) -> Result:
    """Run a function of a policy, in smaller micro-batches if it does not fit into memory.

    Args:
        policy: the policy, whose `micro_batch` is lowered if needed.
        attempt: the function to run.
        rows: decisions of a micro-batch if the policy has no limit.

    Raises:
        ValueError: the function runs out of memory even with one decision at a time.
    """

    def try_with(limit: int | None) -> Result:
        policy.micro_batch = limit
        return attempt()

    result, policy.micro_batch = retry_with_smaller_limit(
        try_with,
        policy.micro_batch,
        lambda limit: None if limit == 1 else (limit or rows) // 2 or 1,
        lambda limit: f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={limit}",
        SMALLER,
    )
    return result
