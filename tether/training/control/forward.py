"""Forward passes of a control policy: over a whole rollout, and, differentiable, over decisions of a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorClass
from torch import Tensor

from tether.batch import EnvBatch
from tether.models.control import ControlPolicy, NetworkPolicy, Observations, Policy
from tether.training.control.chunk_levels import Level, sum_to_level
from tether.training.control.samples import Samples


@dataclass(frozen=True)
class RolloutOutputs:
    """A policy's outputs for M rows of C decisions; see the fields of `EnvBatch`."""

    log_probs: Tensor
    """[M, C, L]"""
    seen: Observations
    values: Tensor | None
    bootstrap_values: Tensor | None


@dataclass(frozen=True)
class RolloutForward:
    """Log-probabilities of what was done, and the critic's values where there is one."""

    logprob_level: Level = "action_level"

    @torch.no_grad()
    def __call__(self, policy: Policy, batch: EnvBatch, reference: object = None) -> RolloutOutputs:
        """See `tether.training.protocol.Forward`."""
        chunk, seen = batch.chunk, policy.inputs(batch.obs)
        row, step = batch.final_at
        passed = policy.review(
            seen,
            batch.starts,
            batch.state,
            policy.inputs(batch.final_obs),
            (row, step // chunk),
            batch.actions,
        )
        mask = batch.valid.unflatten(1, (-1, chunk)) if chunk > 1 else None
        columns = policy.head.evaluate(passed.outputs, batch.actions).log_probs
        log_probs = sum_to_level(columns, self.logprob_level, chunk, mask)
        return RolloutOutputs(log_probs, seen, passed.values, passed.final_values)


class DecisionOutputs(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """A policy's outputs for B decisions on K actions of D columns."""

    log_probs: Tensor
    """[B, K * D]"""
    entropy: Tensor
    """[B, K * D]"""
    values: Tensor | None  # type: ignore[assignment]
    """[B, V]; None: there is no critic."""


@dataclass(frozen=True)
class DecisionForward:
    """Differentiable log-probabilities, entropies and values of a policy without a memory."""

    def __call__(
        self, policy: ControlPolicy | NetworkPolicy, samples: Samples, reference: object = None
    ) -> DecisionOutputs:
        """See `tether.training.protocol.Forward`."""
        assert samples.memory is None
        if isinstance(policy, ControlPolicy):
            passed = policy.run(samples.obs, None)
            outputs, values = passed.outputs, passed.values
        else:
            outputs, values = policy(samples.obs, None, samples.actions.new_zeros(len(samples), 0))
        done = policy.head.evaluate(outputs, samples.actions)
        return DecisionOutputs(done.log_probs, done.entropy, values, batch_size=[len(samples)])
