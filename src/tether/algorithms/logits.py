"""Exact quantities of the full next-token distribution, computed for one chunk of positions at a time.

Only one chunk is in memory in float32 at full vocabulary width: the backward pass recomputes it.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tether.algorithms.masking import clip
from tether.algorithms.registry import NonPositive, PositiveInt


def entropy_from_logits(logits: Float[Tensor, "*shape V"], chunk_size: PositiveInt = 1024) -> Float[Tensor, "*shape"]:
    """Return the entropy of each position in nats: logsumexp(z) - sum_v p_v z_v.

    Divide logits by the temperature first. A token with logit -inf has probability 0 and no gradient.
    """
    return _chunked(_entropy, chunk_size, logits)


def sum_pi_squared(logits: Float[Tensor, "*shape V"], chunk_size: PositiveInt = 1024) -> Float[Tensor, "*shape"]:
    """Return the probability that two samples are equal, sum_v p_v^2, which `optimal_token_baseline` needs."""
    return _chunked(_collision, chunk_size, logits)


def full_kl(
    logits: Float[Tensor, "*shape V"], ref_logits: Float[Tensor, "*shape V"], chunk_size: PositiveInt = 1024
) -> Float[Tensor, "*shape"]:
    """Return the exact KL(policy || reference) of each position, with its exact gradient.

    It is sum_v p_v (log p_v - log q_v). A token with probability 0 under the policy (a logit of -inf) contributes 0,
    whatever its probability under the reference. The KL is infinite if the reference gives probability 0 to a token
    that the policy may sample.

    Assumes: the logits of both models are in memory at once, which costs two vectors of vocabulary size per token.
    Use it: where the estimators are too noisy, for small models, or in distillation.
    """
    return _chunked(_kl, chunk_size, logits, ref_logits)


def forward_kl_topk(
    logits: Float[Tensor, "*shape V"],
    ref_logits: Float[Tensor, "*shape V"],
    *,
    topk: PositiveInt,
    log_prob_min_clamp: NonPositive | None = None,
) -> Float[Tensor, "*shape"]:
    """Return KL(reference || policy) of each position over the reference's topk most probable tokens; at least 0.

    It is sum_v q_v (log q_v - log p_v), as verl computes it: the probabilities of these tokens are not normalised to a
    sum of 1. log_prob_min_clamp is the lower bound of both log-probs.

    Assumes: the logits of both models are in memory at once. The reference gets no gradient.
    Use it: in distillation, to make the policy cover all modes of the teacher, not only the most likely one.
    Keys: `distillation.distillation_loss.loss_mode=forward_kl_topk`, `distillation.distillation_loss.topk`,
        `distillation.distillation_loss.log_prob_min_clamp`.
    """
    ref_log_probs, tokens = _log_softmax(ref_logits.detach()).topk(min(topk, ref_logits.shape[-1]))
    log_probs = _log_softmax(logits).gather(-1, tokens)
    if log_prob_min_clamp is not None:
        log_probs, ref_log_probs = (clip(each, log_prob_min_clamp, math.inf) for each in (log_probs, ref_log_probs))
    kl = (ref_log_probs.exp() * _where_possible(ref_log_probs, ref_log_probs - log_probs)).sum(dim=-1)
    return clip(kl, 0.0, math.inf)


def _entropy(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    log_probs = _log_softmax(logits)
    return -(log_probs.exp() * _where_possible(log_probs, log_probs)).sum(dim=-1)


def _collision(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    return _log_softmax(logits).exp().square().sum(dim=-1)


def _kl(logits: Float[Tensor, "N V"], ref_logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    log_probs = _log_softmax(logits)
    return (log_probs.exp() * _where_possible(log_probs, log_probs - _log_softmax(ref_logits))).sum(dim=-1)


def _where_possible(
    log_probs: Float[Tensor, "*shape V"], values: Float[Tensor, "*shape V"]
) -> Float[Tensor, "*shape V"]:
    """Set the values of tokens with probability 0 to 0."""
    # They are infinite, and 0 times infinity would be NaN.
    return values.masked_fill(log_probs.isneginf(), 0.0)


def _log_softmax(logits: Float[Tensor, "*shape V"]) -> Float[Tensor, "*shape V"]:
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _chunked(function: Callable[..., Tensor], chunk_size: int, *logits: Tensor) -> Tensor:
    shape = logits[0].shape
    chunks = zip(*(x.reshape(-1, shape[-1]).split(chunk_size) for x in logits), strict=True)
    results = [checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(results).view(shape[:-1])
