"""One forward pass over a micro-batch: what the policy and the critic say of each response token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tensordict import TensorClass
from torch import Tensor
from transformers import PreTrainedModel

from tether.batch import TrainBatch
from tether.models.backbone import hidden_states
from tether.models.critic import value_head_of, values_from_hidden
from tether.models.full_kl import full_kl_of_hidden
from tether.models.logprobs import lm_head_of, token_log_probs
from tether.training.tokens import TokenRows, token_rows


class PolicyOutputs(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The policy at each response token; zero outside the mask."""

    log_probs: Tensor  # [B, T]
    entropy: Tensor | None = None  # [B, T]
    full_kl: Tensor | None = None  # [B, T] from the reference, over the whole vocabulary


class ValueOutputs(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """The critic before each response token; zero outside the mask."""

    values: Tensor  # type: ignore[assignment]  # [B, T]


def _predicting_states(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    states = hidden_states(model, rows.input_ids, rows.position_ids, rows.layout)
    return states[rows.predicts]


@dataclass(frozen=True)
class ReferenceModel:
    """The policy that a KL holds the trained one to: a frozen model, or the trained one with its adapter off."""

    model: PreTrainedModel
    during: Callable[[PreTrainedModel], AbstractContextManager[object]] = nullcontext
    """Entered around every forward pass; with LoRA it switches the adapter off."""


@dataclass(frozen=True)
class PolicyModel:
    """A causal LM as a policy.

    `temperature` divides the logits before the softmax, as the sampler does, so that log-probabilities are those of
    the distribution that was sampled from.
    """

    model: PreTrainedModel
    temperature: float = 1.0
    packed: bool = True
    with_entropy: bool = False
    reference: ReferenceModel | None = None
    """Given where the KL over the whole vocabulary is wanted. It runs beside the policy on the same micro-batch, so
    that neither its hidden states nor its logits are ever kept for a whole batch."""

    def __call__(self, batch: TrainBatch) -> PolicyOutputs:
        """Log-probability (entropy, KL to the reference) of each response token."""
        rows = token_rows(batch, packed=self.packed)
        states = _predicting_states(self.model, rows)
        tokens = token_log_probs(
            states, lm_head_of(self.model), rows.targets, temperature=self.temperature, with_entropy=self.with_entropy
        )
        return PolicyOutputs(
            log_probs=rows.scatter(tokens.log_probs),
            entropy=rows.scatter(tokens.entropy) if tokens.entropy is not None else None,
            full_kl=rows.scatter(self._full_kl(states, rows, self.reference)) if self.reference else None,
            batch_size=batch.batch_size,
        )

    def _full_kl(self, states: Tensor, rows: TokenRows, reference: ReferenceModel) -> Tensor:
        with torch.no_grad(), reference.during(reference.model):
            ref_states = _predicting_states(reference.model, rows)
        return full_kl_of_hidden(
            states, lm_head_of(self.model), ref_states, lm_head_of(reference.model), temperature=self.temperature
        )


@dataclass(frozen=True)
class ValueModel:
    """A critic: the value of a response token is read at the position before it."""

    model: PreTrainedModel
    packed: bool = True

    def __call__(self, batch: TrainBatch) -> ValueOutputs:
        """Value before each response token."""
        rows = token_rows(batch, packed=self.packed)
        states = _predicting_states(self.model, rows)
        values = values_from_hidden(states, value_head_of(self.model))
        return ValueOutputs(values=rows.scatter(values), batch_size=batch.batch_size)
