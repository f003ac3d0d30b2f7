"""One forward pass over a micro-batch: what the policy and the critic say of each response token."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorClass
from torch import Tensor
from transformers import PreTrainedModel

from tether.batch import TrainBatch
from tether.models.backbone import hidden_states
from tether.models.critic import value_head_of, values_from_hidden
from tether.models.kept import KeptSets
from tether.models.logprobs import lm_head_of, token_log_probs
from tether.training.tokens import TokenRows, token_rows


class PolicyOutputs(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The policy at each response token; zero outside the mask."""

    log_probs: Tensor  # [B, T]
    entropy: Tensor | None = None  # [B, T]


class ValueOutputs(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """The critic before each response token; zero outside the mask."""

    values: Tensor  # type: ignore[assignment]  # [B, T]


def _predicting_states(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    states = hidden_states(model, rows.input_ids, rows.position_ids, rows.layout)
    return states[rows.predicts]


@dataclass(frozen=True)
class PolicyModel:
    """A causal LM as a policy.

    `temperature` divides the logits before the softmax, as the sampler does, and where the sampler cut the vocabulary
    (`TrainBatch.kept`) its cut is replayed, so that log-probabilities and entropy are those of the distribution that
    was sampled from.
    """

    model: PreTrainedModel
    temperature: float = 1.0
    packed: bool = True
    with_entropy: bool = False

    def __call__(self, batch: TrainBatch) -> PolicyOutputs:
        """Log-probability (and entropy) of each response token."""
        rows = token_rows(batch, packed=self.packed)
        states = _predicting_states(self.model, rows)
        head = lm_head_of(self.model)
        kept = None
        if batch.kept is not None:
            kept = KeptSets.read(batch.kept, rows.slots, vocabulary=len(head.weight))
        tokens = token_log_probs(
            states, head, rows.targets, temperature=self.temperature, kept=kept, with_entropy=self.with_entropy
        )
        entropy = rows.scatter(tokens.entropy) if tokens.entropy is not None else None
        return PolicyOutputs(log_probs=rows.scatter(tokens.log_probs), entropy=entropy, batch_size=batch.batch_size)


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
