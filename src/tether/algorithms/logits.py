"""Exact quantities of the full next-token distribution, computed for one chunk of positions at a time.

Only one chunk is in memory in float32 at full vocabulary width: the backward pass recomputes it.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tether.algorithms.checks import PositiveInt


def entropy_from_logits(logits: Float[Tensor, "*shape V"], chunk_size: PositiveInt = 1024) -> Float[Tensor, "*shape"]:
    """Return the entropy of each position in nats: logsumexp(z) - sum_v p_v z_v.

    Divide logits by the temperature first. A token with logit -inf has probability 0 and no gradient.
    """
    return _chunked(_entropy, chunk_size, logits)


def sum_pi_squared(logits: Float[Tensor, "*shape V"], chunk_size: PositiveInt = 1024) -> Float[Tensor, "*shape"]:
    """Return the probability that two draws agree, sum_v p_v^2, which `optimal_token_baseline` needs."""
    return _chunked(_collision, chunk_size, logits)


def full_kl(
    logits: Float[Tensor, "*shape V"], ref_logits: Float[Tensor, "*shape V"], chunk_size: PositiveInt = 1024
) -> Float[Tensor, "*shape"]:
    """Return the exact KL(policy || reference) of each position, with its exact gradient.

    It is sum_v p_v (log p_v - log q_v). A token with probability 0 under the policy (a logit of -inf) adds nothing,
    whatever its probability under the reference. The KL is infinite if the reference gives probability 0 to a token
    that the policy may sample.

    Assumes: the logits of both models are in memory at once, which costs two vocabularies per token.
    Use it: where the noise of the estimators is too large: small models, distillation.
    """
    return _chunked(_kl, chunk_size, logits, ref_logits)


def _entropy(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    log_probs = _log_softmax(logits)
    return -(log_probs.exp() * _where_possible(log_probs, log_probs)).sum(dim=-1)


def _collision(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    return _log_softmax(logits).exp().square().sum(dim=-1)


def _kl(logits: Float[Tensor, "N V"], ref_logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    log_probs = _log_softmax(logits)
    return (log_probs.exp() * _where_possible(log_probs, log_probs - _log_softmax(ref_logits))).sum(dim=-1)


def _where_possible(log_probs: Float[Tensor, "N V"], values: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Set the values of tokens with probability 0 to 0."""
    # They are infinite, and 0 times infinity would be NaN.
    return values.masked_fill(log_probs.isneginf(), 0.0)


def _log_softmax(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _chunked(function: Callable[..., Tensor], chunk_size: int, *logits: Tensor) -> Tensor:
    shape = logits[0].shape
    chunks = zip(*(x.reshape(-1, shape[-1]).split(chunk_size) for x in logits), strict=True)
    results = [checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(results).view(shape[:-1])
