"""The exact KL from policy to reference at each position, without a [tokens, vocabulary] tensor of logits.

The logits of both models are computed together, one chunk of the vocabulary at a time, in the forward and again in the
backward pass (`tether.kernels.vocabulary_chunks`, which has the legend). With z and r the logits of policy and
reference over the temperature, p = softmax(z) and q = softmax(r)::

    KL = sum_v p_v (log p_v - log q_v) = sum_v p_v (z_v - r_v) - logsumexp(z) + logsumexp(r)
    d KL / dz_v = p_v (log p_v - log q_v - KL)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tether.algorithms import forward_kl_topk
from tether.kernels import LogitTransform, VocabularyChunks, default_chunk_size, matmul_dtype
from tether.text.models.output import LmHead, logits_of
from tether.types import AutogradContext


def full_kl_of_hidden(
    hidden: Tensor,
    head: LmHead,
    ref_hidden: Tensor,
    ref_head: LmHead,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Return KL(policy || reference) over the whole vocabulary [N], in at least float32.

    It is differentiable in `hidden` and `head`; the reference is a constant. Dtypes are as in `token_log_probs`. The
    result does not depend on `chunk_size` except for the order of floating-point sums.

    Args:
        hidden: [N, E] hidden states of the policy.
        head: the policy's head.
        ref_hidden: [N, E'] hidden states of the reference at the same positions.
        ref_head: the reference's head, with the same vocabulary.
        temperature: divides the logits of both; greater than 0.
        chunk_size: vocabulary entries per chunk.
    """
    assert temperature > 0, "greedy has no log-probs"
    assert len(head.weight) == len(ref_head.weight), "policy and reference differ in vocabulary"
    dtype, ref_dtype = matmul_dtype(hidden), matmul_dtype(ref_hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # it would cast the sums inside
        kl: Tensor = _FullKL.apply(
            hidden.to(dtype),
            head.weight,
            head.bias,
            ref_hidden.detach().to(ref_dtype),
            ref_head.weight.detach(),
            None if ref_head.bias is None else ref_head.bias.detach(),
            LogitTransform(head.scale, head.softcap, temperature),
            LogitTransform(ref_head.scale, ref_head.softcap, temperature),
            chunk_size or default_chunk_size(hidden),
        )
    return kl


@dataclass(frozen=True)
class TopK:
    """The options of `tether.algorithms.forward_kl_topk`."""

    topk: int
    log_prob_min_clamp: float | None = None


def forward_kl_of_hidden(
    hidden: Tensor,
    head: LmHead,
    ref_hidden: Tensor,
    ref_head: LmHead,
    options: TopK,
    *,
    temperature: float = 1.0,
    chunk_size: int = 256,
) -> Tensor:
    """Return `tether.algorithms.forward_kl_topk` of each position [N], in at least float32.

    The arguments are those of `full_kl_of_hidden`, except that `chunk_size` is in positions: all logits of a chunk of
    positions are computed at once, and again in the backward pass.
    """

    def of_chunk(hidden: Tensor, weight: Tensor, bias: Tensor | None, ref_hidden: Tensor) -> Tensor:
        logits = logits_of(hidden, replace(head, weight=weight, bias=bias)) / temperature
        with torch.no_grad():
            ref_logits = logits_of(ref_hidden, ref_head) / temperature
        return forward_kl_topk(logits, ref_logits, **vars(options))

    chunks = zip(hidden.split(chunk_size), ref_hidden.split(chunk_size), strict=True)
    # Weight and bias are arguments, so that the checkpoint keeps them until the backward pass of a sharded model.
    kl = [
        checkpoint(of_chunk, mine, head.weight, head.bias, theirs, use_reentrant=False, preserve_rng_state=False)
        for mine, theirs in chunks
    ]
    return torch.cat(kl)


class _FullKL(torch.autograd.Function):
    """Computes `full_kl_of_hidden`; it saves [N] statistics and recomputes both models' logits in backward."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        ref_bias: Tensor | None,
        transform: LogitTransform,
        ref_transform: LogitTransform,
        chunk_size: int,
    ) -> Tensor:
        chunks = VocabularyChunks(hidden, weight, bias, transform, chunk_size)
        ref_chunks = VocabularyChunks(ref_hidden, ref_weight, ref_bias, ref_transform, chunk_size)
        # Running sums over the chunks, with m the maximum: sum e^(z-m), sum e^(z-m) (z-r), and for r: sum e^(r-m).
        mass, moment = (torch.zeros(len(hidden), 1, dtype=chunks.dtype, device=hidden.device) for _ in range(2))
        ref_mass = torch.zeros_like(mass, dtype=ref_chunks.dtype)
        top, ref_top = (torch.full_like(sums, torch.finfo(sums.dtype).min) for sums in (mass, ref_mass))
        for (_, _, z, gap), (_, _, r, _) in zip(chunks, ref_chunks, strict=True):
            torch.sub(z, r, out=gap)
            new_top, new_ref_top = (torch.maximum(m, x.amax(1, keepdim=True)) for m, x in ((top, z), (ref_top, r)))
            exp_z, exp_r = z.sub_(new_top).exp_(), r.sub_(new_ref_top).exp_()
            decay = (top - new_top).exp()  # rescales the sums so far to the new maximum
            moment = decay * moment + torch.linalg.vecdot(exp_z, gap)[:, None]
            mass = decay * mass + exp_z.sum(1, keepdim=True)
            ref_mass = (ref_top - new_ref_top).exp() * ref_mass + exp_r.sum(1, keepdim=True)
            top, ref_top = new_top, new_ref_top
        log_normalizer, ref_log_normalizer = top + mass.log(), ref_top + ref_mass.log()
        kl = moment / mass - log_normalizer + ref_log_normalizer
        ctx.save_for_backward(
            hidden, weight, bias, ref_hidden, ref_weight, ref_bias, log_normalizer, ref_log_normalizer, kl
        )
        ctx.transforms, ctx.chunk_size = (transform, ref_transform), chunk_size
        return kl[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, from_kl: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, normalizer, ref_normalizer, kl = ctx.saved_tensors
        transform, ref_transform = ctx.transforms
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        chunks = VocabularyChunks(hidden, weight, bias, transform, ctx.chunk_size)
        ref_chunks = VocabularyChunks(ref_hidden, ref_weight, ref_bias, ref_transform, ctx.chunk_size)
        grad_hidden = torch.zeros_like(hidden, dtype=chunks.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        upstream = from_kl[:, None] * (transform.scale / transform.temperature)
        for (span, weight_rows, z, grad), (_, _, r, _) in zip(chunks, ref_chunks, strict=True):
            softcap_slope = transform.softcap_slope(z)
            log_p, log_q = torch.sub(z, normalizer, out=grad), r.sub_(ref_normalizer)
            p = torch.exp(log_p, out=z)
            grad = log_p.sub_(log_q).sub_(kl).mul_(p).mul_(upstream)
            if softcap_slope is not None:
                grad.mul_(softcap_slope)
            grad_logits = chunks.for_matmul(grad)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ weight_rows
            if grad_weight is not None:
                grad_weight[span] = grad_logits.T @ hidden
            if grad_bias is not None:
                grad_bias[span] = grad.sum(0)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 6
