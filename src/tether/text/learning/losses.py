"""The forward passes of policy and critic over one micro-batch, and their losses: the token losses of
`tether.algorithms`, aggregated.

Forward passes and losses are plain, picklable objects; the engine that owns the model passes it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from tensordict import TensorClass
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms import (
    TOKEN_SELECTIONS,
    Max,
    Mean,
    TokenLoss,
    aggregate_loss,
    distillation_loss,
    kl_penalty,
    masked_mean_ratio,
    value_loss,
)
from tether.batch import TrainBatch, filled, on_device
from tether.kernels import select_rows
from tether.loop.engine import LossSizes, LossTerm
from tether.loop.own_functions import policy_loss
from tether.text.learning.packing import Experts, TokenRows, token_rows
from tether.text.models.expert_choice import ExpertChoice, recorded_choice
from tether.text.models.full_kl import TopK, forward_kl_of_hidden, full_kl_of_hidden
from tether.text.models.output import (
    LogProbs,
    hidden_states,
    lm_head_of,
    token_log_probs,
    value_head_of,
    values_from_hidden,
)
from tether.text.models.truncation_record import KeptSets
from tether.text.models.ulysses import SequenceRanks


class PolicyOutputs(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The policy's outputs for each response token, on its device; zero outside the mask."""

    log_probs: Tensor  # [B, T]
    entropy: Tensor | None = None  # [B, T]
    sum_pi_squared: Tensor | None = None  # [B, T]
    full_kl: Tensor | None = None  # [B, T] from the reference, over the whole vocabulary
    routed_experts: Tensor | None = None  # [B, W, L, k], see `RolloutBatch.routed_experts`


class ValueOutputs(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """The critic's values before each response token, on its device; zero outside the mask."""

    values: Tensor  # type: ignore[assignment]  # [B, T]
    bootstrap_values: Tensor | None = None  # [B], after the last token of a truncated response; 0 for others


def _states(model: PreTrainedModel, rows: TokenRows, choice: ExpertChoice | None = None) -> Tensor:
    return hidden_states(model, rows.input_ids, rows.position_ids, rows.layout, choice)


@dataclass(frozen=True)
class ReferenceModel:
    """The model that the KL is computed against: a frozen one, such as a teacher, or the policy without its adapter."""

    model: PreTrainedModel
    inference_context: Callable[[PreTrainedModel], AbstractContextManager[object]] = nullcontext
    """A context for every forward pass, which disables the adapter with LoRA."""
    other_models: tuple[PreTrainedModel, ...] = ()
    """The models of the second and further teachers, in the order of `TrainBatch.teacher`."""


@dataclass(frozen=True)
class PolicyForward:
    """The forward pass of a causal LM as a policy.

    `temperature` divides the logits before the softmax, as in the sampler, and the sampler's truncation of the
    vocabulary (`TrainBatch.kept`) is replayed, so that log-probs and entropy are those of the distribution that was
    sampled from. Only `full_kl` is always over the whole vocabulary.
    """

    temperature: float = 1.0
    packed: bool = True
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    """Whether to compute the sum of squared probabilities over the vocabulary, without a gradient."""
    with_full_kl: bool = False
    """Whether to compute the KL over the whole vocabulary. The reference runs on the same micro-batch as the policy, so
    that neither its hidden states nor its logits are stored for a whole batch."""
    forward_kl: TopK | None = None
    """The options of a KL from the reference to the policy, which then replaces the full KL."""
    experts: Experts = "chosen"
    """How experts are chosen; the reference always uses the choice of its own routers."""

    def __call__(
        self,
        model: PreTrainedModel,
        batch: TrainBatch,
        reference: ReferenceModel | None = None,
        ranks: SequenceRanks | None = None,
    ) -> PolicyOutputs:
        """Return the requested outputs for each response token, gathered over `ranks` that split the rows."""
        head = lm_head_of(model)
        host_rows = token_rows(batch, packed=self.packed, ranks=ranks, experts=self.experts)
        rows = on_device(host_rows, head.weight.device)
        choice = None if self.experts == "chosen" else ExpertChoice(rows.experts, records=self.experts == "recorded")
        states = select_rows(_states(model, rows, choice), rows.predicts)
        outputs = self.outputs(batch, rows, partial(token_log_probs, states, head), len(head.weight))
        if self.with_full_kl:
            outputs.full_kl = rows.scatter(self._full_kl(model, states, rows, reference, batch.teacher))
        if choice is not None and choice.records:
            outputs.routed_experts = rows.by_row(recorded_choice(model, choice))
        return outputs

    def outputs(
        self, batch: TrainBatch, rows: TokenRows, log_probs: Callable[..., LogProbs], vocabulary: int
    ) -> PolicyOutputs:
        """Return the requested outputs except the full KL.

        Args:
            batch: the rows.
            rows: the model's inputs for them, on its device.
            log_probs: returns the log-probs of targets [M], with the keywords of `token_log_probs`.
            vocabulary: the number of tokens of the head.
        """
        candidates = None
        if batch.kept is not None:
            candidates = on_device(KeptSets.read(batch.kept, rows.slots.cpu(), vocabulary), rows.slots.device)
        tokens = log_probs(
            rows.targets,
            temperature=self.temperature,
            candidates=candidates,
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
        self,
        model: PreTrainedModel,
        states: Tensor,
        rows: TokenRows,
        reference: ReferenceModel | None,
        teacher: Tensor | None,
    ) -> Tensor:
        assert reference, "the full KL needs a reference"
        if teacher is None:
            return self._kl_of_tokens(model, states, rows, reference)
        of_token = teacher.to(rows.slots.device)[rows.slots // rows.shape[1]]
        kl, tokens = [], []
        for index in teacher.unique().tolist():  # each teacher reads all rows, but only the tokens of its own count
            (mine,) = (of_token == index).nonzero(as_tuple=True)
            own = ReferenceModel((reference.model, *reference.other_models)[index])
            subset = replace(rows, predicts=rows.predicts[mine])
            kl.append(self._kl_of_tokens(model, select_rows(states, mine), subset, own))
            tokens.append(mine)
        return torch.cat(kl)[torch.cat(tokens).argsort()]

    def _kl_of_tokens(
        self, model: PreTrainedModel, states: Tensor, rows: TokenRows, reference: ReferenceModel
    ) -> Tensor:
        with torch.no_grad(), reference.inference_context(reference.model):
            ref_states = _states(reference.model, rows)[rows.predicts]
        pair = (states, lm_head_of(model), ref_states, lm_head_of(reference.model))
        if self.forward_kl is not None:
            return forward_kl_of_hidden(*pair, self.forward_kl, temperature=self.temperature)
        return full_kl_of_hidden(*pair, temperature=self.temperature)


@dataclass(frozen=True)
class ValueForward:
    """The forward pass of a critic, where the value of a response token is computed at the position before it."""

    packed: bool = True
    with_bootstrap: bool = False
    """Whether to compute the value after the last token of a truncated response, which is the state at the length
    limit."""

    def __call__(
        self,
        model: PreTrainedModel,
        batch: TrainBatch,
        reference: ReferenceModel | None = None,
        ranks: SequenceRanks | None = None,
    ) -> ValueOutputs:
        """Return the value before each response token, and after the last one if requested."""
        head = value_head_of(model)
        rows = on_device(token_rows(batch, packed=self.packed, ranks=ranks), next(head.parameters()).device)
        return self.outputs(batch, rows, _states(model, rows), partial(values_from_hidden, head=head))

    def outputs(
        self, batch: TrainBatch, rows: TokenRows, states: Tensor, values: Callable[[Tensor], Tensor]
    ) -> ValueOutputs:
        """Return the requested outputs.

        Args:
            batch: the rows.
            rows: the model's inputs for them, on its device.
            states: [N, E] hidden states before the head.
            values: returns the values of hidden states.
        """
        after = None
        if self.with_bootstrap:
            has_end = batch.truncated.to(states.device) & (rows.ends >= 0)
            last = values(states[rows.ends[has_end]])  # a rank may have no token of these rows
            after = last.new_zeros(len(has_end)).masked_scatter(has_end, last)
            after = after if rows.ranks is None else rows.ranks.sum(after)
        return ValueOutputs(
            values=rows.scatter(values(select_rows(states, rows.predicts))),
            bootstrap_values=after,
            batch_size=batch.batch_size,
        )


@dataclass(frozen=True)
class Aggregation:
    """Aggregates the losses of tokens to one number."""

    mode: str = "token-mean"
    """One of `tether.algorithms.AGGREGATIONS`, or ``masked_mean_ratio`` with each row as an episode."""
    scale_factor: float | None = None
    """Divisor for modes with ``-norm``, or the episode length with full weight for ``masked_mean_ratio``; the default
    is `width`."""
    width: int | None = None
    """Maximum number of tokens of a response. None: the longest response of the batch, so that the weight of a row in
    these two modes depends on the lengths of other rows."""

    def __call__(self, loss: Tensor, mask: Tensor, sizes: LossSizes) -> Tensor:
        """Return this micro-batch's share of the mini-batch's loss from token losses [b, T]."""
        width = self.width or loss.shape[1]
        if self.mode == "masked_mean_ratio":
            return masked_mean_ratio(
                loss,
                mask,
                episode_length=mask.sum(dim=-1, keepdim=True),
                max_episode_length=self.scale_factor or width,
                num_elements=sizes.num_sequences * width,
            )
        return aggregate_loss(
            loss,
            mask,
            self.mode,
            num_tokens=sizes.num_tokens,
            num_sequences=sizes.num_sequences,
            max_length=self.scale_factor or width,
        )


@dataclass(frozen=True)
class Distillation:
    """The loss of distillation from the reference, which has the teacher of each row."""

    kl_kind: str = "k3"
    coefficient: float | None = 1.0
    """Weight of the loss when it is added to the policy loss; None: distillation is the only loss."""
    loss_max_clamp: float | None = None
    use_policy_gradient: bool = False
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    teachers: tuple[str, ...] = ()
    """Names of several teachers, in the order of `TrainBatch.teacher`, for a metric of each."""

    def __call__(self, outputs: PolicyOutputs, batch: TrainBatch, old_log_probs: Tensor) -> TokenLoss:
        """Compute the loss of each token."""
        kl = _token_kl(self.kl_kind, outputs, batch)
        taught = distillation_loss(
            kl,
            outputs.log_probs,
            old_log_probs,
            batch.response_mask,
            loss_max_clamp=self.loss_max_clamp,
            use_policy_gradient=self.use_policy_gradient,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            rollout_is_weights=batch.rollout_is_weights,
        )
        for index, name in enumerate(self.teachers):
            mask = batch.response_mask & (filled(batch.teacher) == index)[:, None]
            if mask.any():
                taught.metrics[f"distillation/kl/{name}"] = Mean.of(kl, mask)
        return taught


def _token_kl(kind: str, outputs: PolicyOutputs, batch: TrainBatch) -> Tensor:
    """Return the KL of each token: over the vocabulary if the forward pass computed it, otherwise an estimate."""
    if outputs.full_kl is not None:
        return outputs.full_kl
    return kl_penalty(outputs.log_probs, filled(batch.ref_log_probs), kind, batch.response_mask)


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss, minus the entropy bonus, plus the KL to the reference or the loss of distillation."""

    name: str = "vanilla"
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the policy loss, such as clip ratios."""
    aggregation: Aggregation = Aggregation()
    penalty_aggregation: Aggregation | None = None
    """Aggregation of the entropy bonus and the KL; None: that of the policy loss."""
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"
    distillation: Distillation | None = None

    def __call__(self, outputs: PolicyOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        """Compute the loss as a `tether.loop.engine.LossFunction`; needs `advantages`.

        Without `old_log_probs` the policy counts as the old one, as in the first update after a rollout: every ratio is
        1, and only its gradient matters.
        """
        mask = batch.response_mask
        old_log_probs = outputs.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        token_loss = policy_loss(self.name)(
            outputs.log_probs,
            old_log_probs,
            batch.advantages,
            mask,
            selected=batch.selected,
            rollout_log_probs=batch.rollout_log_probs,
            rollout_is_weights=batch.rollout_is_weights,
            **self.options,
        )
        metrics = dict(token_loss.metrics)
        total = self.aggregation(token_loss.loss, mask, sizes)
        penalty = self.penalty_aggregation or self.aggregation
        shares = {"actor/pg_loss": total}
        if self.distillation is not None:
            taught = self.distillation(outputs, batch, old_log_probs)
            metrics |= taught.metrics
            shares["distillation/loss"] = self.aggregation(taught.loss, mask, sizes)
            weight = self.distillation.coefficient
            total = shares["distillation/loss"] if weight is None else total + weight * shares["distillation/loss"]
        if outputs.entropy is not None:
            metrics["actor/entropy"] = Mean.of(outputs.entropy, mask)
        if self.entropy_coeff:
            assert outputs.entropy is not None
            entropy = penalty(outputs.entropy, mask, sizes)
            total = total - self.entropy_coeff * entropy
        if self.kl_coef:
            kl = penalty(_token_kl(self.kl_kind, outputs, batch), mask, sizes)
            total = total + self.kl_coef * kl
            shares["actor/kl_loss"] = kl
            metrics["actor/kl_coef"] = Max(torch.tensor(self.kl_coef, dtype=torch.float64))
        return LossTerm(total, metrics, shares)


@dataclass(frozen=True)
class LikelihoodLoss:
    """Minus the log-probability of each token, aggregated: the loss of supervised fine-tuning."""

    aggregation: Aggregation = Aggregation()

    def __call__(self, outputs: PolicyOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        total = self.aggregation(-outputs.log_probs, batch.response_mask, sizes)
        return LossTerm(total, {}, {"train/loss": total})


@dataclass(frozen=True)
class TokenSelection:
    """Selects tokens for a policy loss that treats some tokens of a mini-batch differently (`TOKEN_SELECTIONS`).

    The selection is made over the whole mini-batch, before it is split: a selection within each micro-batch would
    differ, and the gradient would depend on how many rows fit into memory.
    """

    name: str
    options: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of the selection."""

    def __call__(self, mini: TrainBatch, outputs: PolicyOutputs, generator: torch.Generator) -> None:
        """Fill in `selected`, as a `tether.loop.engine.Prepare`."""
        mini.selected = TOKEN_SELECTIONS[self.name](
            outputs.log_probs,
            mini.old_log_probs,
            mini.advantages,
            mini.response_mask,
            generator=generator,
            **self.options,
        )


@dataclass(frozen=True)
class CriticLoss:
    """The clipped value loss."""

    cliprange_value: float | None = 0.5
    """Clip range of values; None: no clipping."""
    huber_delta: float | None = None
    aggregation: Aggregation = Aggregation()

    def __call__(self, outputs: ValueOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        """Compute the loss as a `tether.loop.engine.LossFunction`; needs `values` and `returns`."""
        mask = batch.response_mask
        token_loss = value_loss(
            outputs.values,
            filled(batch.values),
            filled(batch.returns),
            mask,
            cliprange_value=self.cliprange_value,
            huber_delta=self.huber_delta,
        )
        total = self.aggregation(token_loss.loss, mask, sizes)
        return LossTerm(total, token_loss.metrics)
