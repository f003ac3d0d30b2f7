"""One forward pass over a micro-batch: the outputs of a policy or a critic for each response token.

A forward is a plain, picklable spec; the engine that owns the model calls it with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from tensordict import TensorClass
from torch import Tensor
from transformers import PreTrainedModel

from tether.batch import TrainBatch, on_device
from tether.kernels import select_rows
from tether.models.language.critic import value_head_of, values_from_hidden
from tether.models.language.expert_choice import ExpertChoice, recorded_choice
from tether.models.language.packing_check import hidden_states
from tether.models.layers import SequenceRanks
from tether.models.output import KeptSets, LogProbs, full_kl_of_hidden, lm_head_of, token_log_probs
from tether.training.text.packing import Experts, TokenRows, token_rows


class PolicyOutputs(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The policy at each response token, on its device; zero outside the mask."""

    log_probs: Tensor  # [B, T]
    entropy: Tensor | None = None  # [B, T]
    sum_pi_squared: Tensor | None = None  # [B, T]
    full_kl: Tensor | None = None  # [B, T] from the reference, over the whole vocabulary
    routed_experts: Tensor | None = None  # [B, W, L, k], see `RolloutBatch.routed_experts`


class ValueOutputs(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """The critic before each response token, on its device; zero outside the mask."""

    values: Tensor  # type: ignore[assignment]  # [B, T]
    bootstrap_values: Tensor | None = None  # [B], after the last token of a truncated response; 0 where it ended itself


def _states(model: PreTrainedModel, rows: TokenRows, choice: ExpertChoice | None = None) -> Tensor:
    return hidden_states(model, rows.input_ids, rows.position_ids, rows.layout, choice)


@dataclass(frozen=True)
class ReferenceModel:
    """The policy that a KL holds the trained one to: a frozen model, or the trained one with its adapter off."""

    model: PreTrainedModel
    during: Callable[[PreTrainedModel], AbstractContextManager[object]] = nullcontext
    """Entered around every forward pass; with LoRA it switches the adapter off."""


@dataclass(frozen=True)
class PolicyForward:
    """The forward pass of a causal LM as a policy.

    `temperature` divides the logits before the softmax, as the sampler does, and where the sampler cut the vocabulary
    (`TrainBatch.kept`) its cut is replayed, so that log-probabilities and entropy are those of the distribution that
    was sampled from. Only `full_kl` is over the whole vocabulary either way.
    """

    temperature: float = 1.0
    packed: bool = True
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    """Also the sum over the vocabulary of the squared probabilities; it carries no gradient."""
    with_full_kl: bool = False
    """Also the KL over the whole vocabulary. The reference runs with the policy on the same micro-batch, so that
    neither its hidden states nor its logits are ever kept for a whole batch."""
    experts: Experts = "chosen"
    """Of a mixture. The reference's routers always choose."""

    def __call__(
        self,
        model: PreTrainedModel,
        batch: TrainBatch,
        reference: ReferenceModel | None = None,
        ranks: SequenceRanks | None = None,
    ) -> PolicyOutputs:
        """Log-probability (and what else is asked for) of each response token, computed where `ranks` have it."""
        head = lm_head_of(model)
        laid = token_rows(batch, packed=self.packed, ranks=ranks, experts=self.experts)
        rows = on_device(laid, head.weight.device)
        choice = None if self.experts == "chosen" else ExpertChoice(rows.experts, records=self.experts == "recorded")
        states = select_rows(_states(model, rows, choice), rows.predicts)
        outputs = self.outputs(batch, rows, partial(token_log_probs, states, head), len(head.weight))
        if self.with_full_kl:
            outputs.full_kl = rows.scatter(self._full_kl(model, states, rows, reference))
        if choice is not None and choice.records:
            outputs.routed_experts = rows.by_row(recorded_choice(model, choice))
        return outputs

    def outputs(
        self, batch: TrainBatch, rows: TokenRows, log_probs: Callable[..., LogProbs], vocabulary: int
    ) -> PolicyOutputs:
        """All outputs that are asked for but the full KL.

        Args:
            batch: the rows.
            rows: the same for the model, on its device.
            log_probs: gives those of targets [M]; the keywords are those of `token_log_probs`.
            vocabulary: tokens of the head.
        """
        kept = None
        if batch.kept is not None:
            kept = on_device(KeptSets.read(batch.kept, rows.slots.cpu(), vocabulary), rows.slots.device)
        tokens = log_probs(
            rows.targets,
            temperature=self.temperature,
            kept=kept,
            with_entropy=self.with_entropy,
            with_sum_pi_squared=self.with_sum_pi_squared,
        )
        return PolicyOutputs(
            log_probs=rows.scatter(tokens.log_probs),
            entropy=rows.scatter(tokens.entropy) if tokens.entropy is not None else None,
            sum_pi_squared=rows.scatter(tokens.sum_pi_squared) if tokens.sum_pi_squared is not None else None,
            batch_size=batch.batch_size,
        )

    def _full_kl(
        self, model: PreTrainedModel, states: Tensor, rows: TokenRows, reference: ReferenceModel | None
    ) -> Tensor:
        assert reference, "the full KL needs a reference"
        with torch.no_grad(), reference.during(reference.model):
            ref_states = _states(reference.model, rows)[rows.predicts]
        return full_kl_of_hidden(
            states, lm_head_of(model), ref_states, lm_head_of(reference.model), temperature=self.temperature
        )


@dataclass(frozen=True)
class ValueForward:
    """The forward pass of a critic: the value of a response token is read at the position before it."""

    packed: bool = True
    with_bootstrap: bool = False
    """Also the value at the last token of a truncated response: of the state in which the length limit cut it."""

    def __call__(
        self,
        model: PreTrainedModel,
        batch: TrainBatch,
        reference: ReferenceModel | None = None,
        ranks: SequenceRanks | None = None,
    ) -> ValueOutputs:
        """Value before each response token, and after the last where that is asked for."""
        head = value_head_of(model)
        rows = on_device(token_rows(batch, packed=self.packed, ranks=ranks), next(head.parameters()).device)
        return self.outputs(batch, rows, _states(model, rows), partial(values_from_hidden, head=head))

    def outputs(
        self, batch: TrainBatch, rows: TokenRows, states: Tensor, values: Callable[[Tensor], Tensor]
    ) -> ValueOutputs:
        """All outputs that are asked for.

        Args:
            batch: the rows.
            rows: the same for the model, on its device.
            states: [N, E] under the head.
            values: gives those of states.
        """
        after = None
        if self.with_bootstrap:
            here = batch.truncated.to(states.device) & (rows.ends >= 0)
            last = values(states[rows.ends[here]])  # a rank that shares the rows may have no token
            after = last.new_zeros(len(here)).masked_scatter(here, last)
            after = after if rows.ranks is None else rows.ranks.sum(after)
        return ValueOutputs(
            values=rows.scatter(values(select_rows(states, rows.predicts))),
            bootstrap_values=after,
            batch_size=batch.batch_size,
        )
