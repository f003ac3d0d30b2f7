"""Forward passes of a control policy over a whole rollout, and differentiable ones over decisions of a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tether.batch import EnvBatch
from tether.control.learning.chunk_levels import Level, sum_to_level
from tether.control.learning.samples import Samples
from tether.control.policies import Observations, Policy, device_of


@dataclass(frozen=True)
class RolloutOutputs:
    """A policy's outputs for M rows of C decisions, on the CPU, which become the fields of `EnvBatch`."""

    log_probs: Tensor
    """[M, C, L]"""
    seen: Observations
    values: Tensor | None
    bootstrap_values: Tensor | None


def _on_cpu(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.cpu()


@dataclass(frozen=True)
class RolloutForward:
    """Computes log-probs of the executed actions, and the critic's values if there is one."""

    logprob_level: Level = "action_level"

    @torch.no_grad()
    def __call__(self, policy: Policy, batch: EnvBatch, reference: object = None) -> RolloutOutputs:
        chunk, device = batch.chunk, device_of(policy)
        seen, actions = policy.inputs(batch.obs.to(device)), batch.actions.to(device)
        row, step = batch.final_at
        passed = policy.review(
            seen,
            batch.starts.to(device),
            batch.state.to(device),
            policy.inputs(batch.final_obs.to(device)),
            (row.to(device), (step // chunk).to(device)),
            actions,
        )
        mask = batch.valid.unflatten(1, (-1, chunk)) if chunk > 1 else None
        columns = policy.head.evaluate(passed.outputs, actions).log_probs.cpu()
        log_probs = sum_to_level(columns, self.logprob_level, chunk, mask)
        return RolloutOutputs(log_probs, seen.cpu(), _on_cpu(passed.values), _on_cpu(passed.final_values))


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
