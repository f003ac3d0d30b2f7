"""What a model computes for tokens: hidden states, and from them log-probabilities, entropies and values.

Log-probabilities and entropies are computed without a [tokens, vocabulary] tensor of logits: one chunk of the
vocabulary at a time, in the forward and again in the backward pass (`tether.kernels.vocabulary_chunks`, which has the
legend). With z = logits / temperature, p = softmax(z) and y the target::

    log_prob = z_y - logsumexp(z)              d log_prob / dz_v = 1[v = y] - p_v
    entropy  = logsumexp(z) - sum_v p_v z_v    d entropy  / dz_v = -p_v (log p_v + entropy)

If sampling kept only some tokens (`KeptSets`), p is 0 for all other tokens in these formulas.

If the vocabulary is split over ranks (`VocabularyShard`), each rank computes the logits of its shard, and the sums are
reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tether.kernels import (
    AttentionLayout,
    KeptTokenSets,
    LogitTransform,
    VocabularyChunks,
    default_chunk_size,
    kernels_for,
    matmul_dtype,
)
from tether.text.models.expert_choice import ExpertChoice, check_choice, follow_choice
from tether.text.models.truncation_record import KeptSets
from tether.types import AutogradContext


@dataclass(frozen=True)
class LmHead:
    """The map from hidden states to logits: ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``."""

    weight: Tensor  # [V, E]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0  # Cohere's logit_scale, one over Granite's logits_scaling
    softcap: float | None = None  # Gemma 2's final_logit_softcapping


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of the head's vocabulary; the other ranks of a group have the other shards."""

    first: int
    """Token id of the shard's first row."""
    group: Any
    """Process group of torch.distributed; None: the default group."""

    def reduce(self, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Reduce the shards' `tether.kernels.vocabulary_chunks.log_sums` to those of the whole vocabulary."""
        target_z, top, mass, moment, square = sums
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        shift = top - highest
        decay = shift.exp()
        scaled = torch.stack([target_z, mass * decay, (moment + shift * mass) * decay, square * decay.square()])
        dist.all_reduce(scaled, group=self.group)
        return scaled[0], highest, *scaled[1:]

    def restrict(self, candidates: KeptSets) -> _ShardOfKept:
        """Return the candidates that are in this shard."""
        return _ShardOfKept(candidates, self.first)


@dataclass(frozen=True)
class _ShardOfKept:
    candidates: KeptSets
    first: int

    def cut(self, span: slice) -> Tensor:
        return self.candidates.cut(slice(span.start + self.first, span.stop + self.first))


@dataclass(frozen=True)
class LogProbs:
    """Log-probs and statistics of each token, in at least float32."""

    log_probs: Tensor  # [N]
    entropy: Tensor | None = None  # [N], of the same distribution, in nats
    sum_pi_squared: Tensor | None = None  # [N], sum over the vocabulary of p squared; carries no gradient


def lm_head_of(model: PreTrainedModel) -> LmHead:
    """Return the output head of a causal LM; its weight is the parameter itself, so gradients reach it.

    Raises:
        ValueError: the head is not a plain linear layer (it has LoRA, is quantized, or there is none).
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"{type(model).__name__}: its output head is {type(layer).__name__}, but log-probs need a plain "
            "linear one. Leave lm_head out of LoRA's target_modules and load the model without quantization."
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LmHead(layer.weight, layer.bias, scale, softcap)


def logits_of(hidden: Tensor, head: LmHead) -> Tensor:
    """Return all logits [..., V]; only for a few positions, because of their size."""
    logits = nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def token_log_probs(
    hidden: Tensor,
    head: LmHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    candidates: KeptSets | None = None,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk_size: int | None = None,
    shard: VocabularyShard | None = None,
) -> LogProbs:
    """Return each target's log-prob under ``softmax(logits / temperature)``, differentiable in `hidden` and `head`.

    The matmuls run in the dtype of `hidden`, or of autocast if it is on; everything else in at least float32. The
    result does not depend on `chunk_size` except for the order of floating-point sums.

    Args:
        hidden: [N, E] output of the backbone at the position before each target.
        head: the output head, from `lm_head_of`.
        targets: [N] token ids.
        temperature: divides the logits of everything that is returned; greater than 0.
        candidates: the tokens that could be sampled at each of the N positions; all results are those of the
            distribution over these tokens. None means all tokens.
        with_entropy: also return the entropy, with gradient.
        with_sum_pi_squared: also return sum_v p_v^2, without gradient.
        chunk_size: vocabulary entries per chunk; by default as many as fit a chunk in the CPU's cache.
        shard: the shard of the vocabulary that the head has, if not all; `targets` and `candidates` still refer to the
            whole vocabulary. The gradient of `hidden` is then that of the shard, and has to be summed over the ranks.
    """
    assert temperature > 0, "greedy has no log-probs"
    dtype = matmul_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would cast the sums inside
        log_probs, entropy, sum_pi_squared = _TokenLogProbs.apply(
            hidden.to(dtype),
            head.weight,
            head.bias,
            targets if shard is None else targets - shard.first,  # targets outside of these rows are in other shards
            LogitTransform(head.scale, head.softcap, temperature),
            candidates if shard is None or candidates is None else shard.restrict(candidates),
            chunk_size or default_chunk_size(hidden),
            with_entropy,
            with_sum_pi_squared,
            shard,
        )
    return LogProbs(log_probs, entropy, sum_pi_squared)


class _TokenLogProbs(torch.autograd.Function):
    """Computes `token_log_probs`; it saves [N] statistics and recomputes the logits in backward."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        candidates: KeptTokenSets | None,
        chunk_size: int,
        with_entropy: bool,
        with_sum_pi_squared: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        chunks = VocabularyChunks(hidden, weight, bias, transform, chunk_size)
        kernels = kernels_for(hidden)
        sums = kernels.log_sums(chunks, targets, candidates, with_entropy, with_sum_pi_squared)
        target_z, top, mass, moment, square = sums if shard is None else shard.reduce(sums)
        log_normalizer = top + mass.log()
        entropy = mass.log() - moment / mass
        sum_pi_squared = (square / mass.square())[:, 0] if with_sum_pi_squared else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)
        ctx.transform, ctx.candidates, ctx.chunk_size = transform, candidates, chunk_size
        if sum_pi_squared is not None:
            ctx.mark_non_differentiable(sum_pi_squared)
        return (target_z - log_normalizer)[:, 0], entropy[:, 0] if with_entropy else None, sum_pi_squared

    @staticmethod
    @once_differentiable
    def backward(
        ctx: AutogradContext, from_log_probs: Tensor | None, from_entropy: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        chunks = VocabularyChunks(hidden, weight, bias, ctx.transform, ctx.chunk_size)
        grad_hidden = torch.zeros_like(hidden, dtype=chunks.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        slope = ctx.transform.scale / ctx.transform.temperature
        to_log_prob, to_entropy = (
            None if grad is None else grad[:, None] * slope for grad in (from_log_probs, from_entropy)
        )
        if to_log_prob is None:
            to_log_prob = torch.zeros_like(log_normalizer)
        statistics = (log_normalizer, entropy, to_log_prob, to_entropy)
        for span, weight_rows, grad in kernels_for(hidden).grad_logits(chunks, targets, ctx.candidates, *statistics):
            if grad_bias is not None:
                grad_bias[span] = grad.sum(0)
            grad_logits = chunks.for_matmul(grad)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ weight_rows
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                torch.mm(grad_logits.T, hidden, out=grad_weight[span])
            elif grad_weight is not None:
                grad_weight[span] = grad_logits.T @ hidden
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None, None


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    choice: ExpertChoice | None = None,
) -> Tensor:
    """Return the final hidden states [R*S, E], without the output head; packed tokens are one row, R = 1 and S = N.

    Args:
        model: a causal LM or critic with tether's attention enabled.
        input_ids: [R, S] token ids.
        position_ids: [R, S] positions in their sequences, as in `Packed.position_ids`.
        layout: which tokens each token attends to.
        choice: records or replays the experts of the tokens.

    Raises:
        ValueError: `choice` is set for a model without a router that tether supports.
    """
    options: dict[str, object] = {} if choice is None else {"expert_choice": choice}
    if choice is not None:
        follow_choice(model)
    out = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, attention_layout=layout, **options
    )
    if choice is not None:
        check_choice(model, choice)
    hidden: Tensor = out.last_hidden_state.flatten(0, 1)
    return hidden


_HEAD_NAMES = ("score", "classifier")  # names of the head in transformers, by model family


def value_head_of(critic: PreTrainedModel) -> nn.Module:
    """Return the scalar head: hidden state [.., E] -> value [.., 1]."""
    head: nn.Module = next(getattr(critic, name) for name in _HEAD_NAMES if hasattr(critic, name))
    return head


def values_from_hidden(hidden: Tensor, head: nn.Module) -> Tensor:
    """Return values [N], in at least float32, for hidden states [N, E].

    The value before a response token is the output at the position before it. The head runs in its own dtype, also
    under autocast, because bfloat16 would round a value near 1 to steps of 0.008.
    """
    weight = next(head.parameters())
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden.to(weight.dtype)).squeeze(-1)
    return values.to(torch.promote_types(values.dtype, torch.float32))
