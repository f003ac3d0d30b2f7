"""Log-probabilities and entropies of tokens from hidden states, without the [tokens, vocabulary] tensor of logits.

Logits are computed a chunk of the vocabulary at a time, forward and again backward
(`tether.models.output.vocabulary_chunks`, which has the legend). With z = logits / temperature, p = softmax(z) and y
the target::

    log_prob = z_y - logsumexp(z)              d log_prob / dz_v = 1[v = y] - p_v
    entropy  = logsumexp(z) - sum_v p_v z_v    d entropy  / dz_v = -p_v (log p_v + entropy)

Where sampling kept only some tokens (`KeptSets`), the others have p = 0 in all of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tether.kernels.dispatch import loops_for
from tether.models.output.truncation_record import KeptSets
from tether.models.output.vocabulary_chunks import LogitTransform, VocabularyChunks, default_chunk_size, matmul_dtype

CUT = -1e30
"""z of a token that sampling did not keep: its exp is 0, and unlike -inf it stays finite in products with 0."""


@dataclass(frozen=True)
class LmHead:
    """What turns hidden states into logits: ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``."""

    weight: Tensor  # [V, E]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0  # Cohere's logit_scale, one over Granite's logits_scaling
    softcap: float | None = None  # Gemma 2's final_logit_softcapping


@dataclass(frozen=True)
class LogProbs:
    """Of each token, in at least float32."""

    log_probs: Tensor  # [N]
    entropy: Tensor | None = None  # [N], of the same distribution, in nats
    sum_pi_squared: Tensor | None = None  # [N], sum over the vocabulary of p squared; carries no gradient


def lm_head_of(model: PreTrainedModel) -> LmHead:
    """The output head of a causal LM; its weight is the very parameter, so gradients reach it.

    Raises:
        ValueError: the head is no plain linear layer (LoRA on it, quantized, or none at all).
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
    """The logits [..., V] themselves, for the few positions where all of them are needed."""
    logits = nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def token_log_probs(
    hidden: Tensor,
    head: LmHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk_size: int | None = None,
) -> LogProbs:
    """Log-probability of each target under ``softmax(logits / temperature)``, differentiable in `hidden` and `head`.

    The matmuls run in the dtype of `hidden`, or of autocast where it is on; all else in at least float32. The result
    does not depend on `chunk_size` but for the order of floating-point sums.

    Args:
        hidden: [N, E] output of the backbone at the position before each target.
        head: see `lm_head_of`.
        targets: [N] token ids.
        temperature: divides the logits of everything that is returned; over 0.
        kept: the tokens that each of the N could be sampled from; everything that is returned is of the distribution
            over these alone. None: all of them.
        with_entropy: also return the entropy, with gradient.
        with_sum_pi_squared: also return sum_v p_v^2, without gradient.
        chunk_size: vocabulary entries a chunk; by default as many as keep a chunk in the CPU's cache.
    """
    assert temperature > 0, "greedy has no log-probs"
    dtype = matmul_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # it would cast the sums inside
        log_probs, entropy, sum_pi_squared = _TokenLogProbs.apply(
            hidden.to(dtype),
            head.weight,
            head.bias,
            targets,
            LogitTransform(head.scale, head.softcap, temperature),
            kept,
            chunk_size or default_chunk_size(hidden),
            with_entropy,
            with_sum_pi_squared,
        )
    return LogProbs(log_probs, entropy, sum_pi_squared)


def _locate(targets: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Which targets [N, 1] lie in a chunk, and their column there (0 for those that do not)."""
    inside = (targets >= span.start) & (targets < span.stop)
    return inside[:, None], torch.where(inside, targets - span.start, 0)[:, None]


class _TokenLogProbs(torch.autograd.Function):
    """See `token_log_probs`. Keeps [N] statistics and recomputes the logits backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        kept: KeptSets | None,
        chunk_size: int,
        with_entropy: bool,
        with_sum_pi_squared: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        chunks = VocabularyChunks(hidden, weight, bias, transform, chunk_size)
        loops = _loops(chunks, kept)
        if loops is None:
            target_z, *sums = _sums(chunks, targets, kept, with_entropy, with_sum_pi_squared)
        else:
            target_z, *sums = _sums_by_loop(loops, chunks, targets)
        top, mass, moment, square = sums
        log_normalizer = top + mass.log()
        entropy = mass.log() - moment / mass
        sum_pi_squared = (square / mass.square())[:, 0] if with_sum_pi_squared else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy)
        ctx.transform, ctx.kept, ctx.chunk_size = transform, kept, chunk_size
        if sum_pi_squared is not None:
            ctx.mark_non_differentiable(sum_pi_squared)
        return (target_z - log_normalizer)[:, 0], entropy[:, 0] if with_entropy else None, sum_pi_squared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_log_probs: Tensor | None, from_entropy: Tensor | None, _: None) -> tuple[Any, ...]:
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
        loops = _loops(chunks, ctx.kept)
        if loops is None:
            gradients = _grad_logits(chunks, targets, ctx.kept, log_normalizer, entropy, to_log_prob, to_entropy)
        else:
            gradients = _grad_logits_by_loop(loops, chunks, targets, log_normalizer, entropy, to_log_prob, to_entropy)
        for span, weight_rows, grad in gradients:
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
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _sums(
    chunks: VocabularyChunks, targets: Tensor, kept: KeptSets | None, with_entropy: bool, with_sum_pi_squared: bool
) -> tuple[Tensor, ...]:
    """[N, 1] each: z of the target, and with m = max z: m, sum e^(z-m), sum e^(z-m) (z-m), sum e^2(z-m)."""
    target_z = torch.zeros(len(targets), 1, dtype=chunks.dtype, device=targets.device)
    mass, moment, square = (torch.zeros_like(target_z) for _ in range(3))
    top = torch.full_like(target_z, torch.finfo(chunks.dtype).min)
    for span, _, z, exp_z in chunks:
        if kept is not None:
            z.masked_fill_(kept.cut(span), CUT)
        inside, column = _locate(targets, span)
        target_z = torch.where(inside, z.gather(1, column), target_z)
        new_top = torch.maximum(top, z.amax(1, keepdim=True))
        torch.exp(z.sub_(new_top), out=exp_z)
        shift = top - new_top
        decay = shift.exp()  # what the sums so far shrink by under the new maximum
        if with_entropy:
            moment = decay * (moment + shift * mass) + torch.linalg.vecdot(exp_z, z)[:, None]
        if with_sum_pi_squared:
            square = decay.square() * square + torch.linalg.vecdot(exp_z, exp_z)[:, None]
        mass = decay * mass + exp_z.sum(1, keepdim=True)
        top = new_top
    return target_z, top, mass, moment, square


def _sums_by_loop(loops: Any, chunks: VocabularyChunks, targets: Tensor) -> tuple[Tensor, ...]:
    """See `_sums`."""
    factor = chunks.transform.scale / chunks.transform.temperature
    target_z = torch.zeros(len(targets), 1, dtype=chunks.dtype)
    sums = torch.tensor([torch.finfo(chunks.dtype).min, 0, 0, 0]).repeat(len(targets), 1)
    for span, _, logits in chunks.products():
        inside, column = _locate(targets, span)
        target_z = torch.where(inside, logits.gather(1, column).to(chunks.dtype).mul_(factor), target_z)
        loops.log_sums(*logits.shape, factor, logits, sums)
    return target_z, *sums.split(1, dim=1)


def _grad_logits(
    chunks: VocabularyChunks,
    targets: Tensor,
    kept: KeptSets | None,
    log_normalizer: Tensor,
    entropy: Tensor,
    to_log_prob: Tensor,
    to_entropy: Tensor | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each chunk its span, its weight and the gradient of its logits [N, C].

    dz = g (1[v = y] - p) - h p (log p + entropy) for upstream gradients g of the log-prob, h of the entropy.
    """
    for span, weight, z, p in chunks:
        softcap_slope = chunks.transform.slope_beside(z)
        if kept is not None:
            z.masked_fill_(kept.cut(span), CUT)
        torch.exp(z.sub_(log_normalizer), out=p)
        if to_entropy is None:
            grad = p.mul_(-to_log_prob)
        else:
            grad = z.add_(entropy).mul_(to_entropy).add_(to_log_prob).mul_(p).neg_()
        inside, column = _locate(targets, span)
        grad.scatter_add_(1, column, torch.where(inside, to_log_prob, 0.0))
        yield span, weight, grad if softcap_slope is None else grad.mul_(softcap_slope)


def _grad_logits_by_loop(
    loops: Any,
    chunks: VocabularyChunks,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    to_log_prob: Tensor,
    to_entropy: Tensor | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """See `_grad_logits`."""
    factor = chunks.transform.scale / chunks.transform.temperature
    to_entropy = torch.zeros_like(to_log_prob) if to_entropy is None else to_entropy
    rows = torch.cat([log_normalizer, entropy, to_log_prob, to_entropy], dim=1)
    for span, weight, logits in chunks.products():
        column = torch.where((targets >= span.start) & (targets < span.stop), targets - span.start, -1)
        loops.log_probs_backward(*logits.shape, factor, logits, rows, column)
        yield span, weight, logits


def _loops(chunks: VocabularyChunks, kept: KeptSets | None) -> Any:
    """The loops where they do all that is asked for."""
    is_plain = kept is None and chunks.bias is None and chunks.transform.softcap is None
    return loops_for(chunks.hidden) if is_plain else None
