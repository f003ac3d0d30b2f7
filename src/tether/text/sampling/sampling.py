"""Samples a token from logits, with its log-probability under the sampled distribution.

Sampling inverts the cumulative distribution at a given uniform number. Nothing of the vocabulary's size is sorted or
accumulated: each row is summed in blocks, the block with the number is located first, the token in it second.

Legend: R = rows, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tether.kernels import inverse_sample, kernels_for, rows_in_scratch
from tether.text.sampling.protocol import SamplingParams


class SampledTokens(NamedTuple):
    """One sampled token for each row."""

    token: Tensor
    """[R] int64."""
    log_prob: Tensor
    """[R], fp32 (fp64 for fp64 logits); not finite if and only if the row's logits give no distribution."""
    candidates: Tensor
    """[R, V] bool, the tokens that could be sampled; [R, 0] unless requested."""


def sample_tokens(
    logits: Tensor, uniform: Tensor, sampling: SamplingParams, *, with_candidates: bool = False
) -> SampledTokens:
    """Sample one token from each row.

    The order is temperature, then top-k, then top-p of the remaining tokens, each renormalised; the log-probability is
    that of the final distribution. Tokens that tie with the last candidate are candidates too, so the candidates are a
    function of the logits alone. At temperature 0 the token is the (first) argmax, regardless of top-k and top-p, and
    its log-probability is that of the plain softmax.

    Args:
        logits: [R, V], any floating dtype; -inf forbids a token.
        uniform: [R] numbers in [0, 1).
        sampling: temperature, top_k and top_p are read.
        with_candidates: also return the tokens with a probability above 0.
    """
    is_plain = sampling.temperature != 0 and not with_candidates and not sampling.cuts(logits.shape[-1])
    if is_plain:
        sampled = kernels_for(logits).sample(logits, uniform, sampling.temperature)
        return SampledTokens(*sampled, _no_candidates(logits))
    at_once = rows_in_scratch(logits)
    chunks = zip(logits.split(at_once), uniform.split(at_once), strict=True)
    if sampling.temperature == 0:
        draws = [_greedy(rows) for rows, _ in chunks]
    else:
        draws = [_sample(rows, numbers, sampling, with_candidates) for rows, numbers in chunks]
    return SampledTokens(*map(torch.cat, zip(*draws, strict=True)))


def _greedy(logits: Tensor) -> SampledTokens:
    exact = logits.to(_exact(logits))
    top, token = exact.max(dim=-1)
    return SampledTokens(token, top - exact.logsumexp(dim=-1), _no_candidates(logits))


def _no_candidates(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), 0, dtype=torch.bool, device=logits.device)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams, with_candidates: bool) -> SampledTokens:
    exact = logits.to(_exact(logits))
    weights = (exact if sampling.temperature == 1 else exact / sampling.temperature).softmax(dim=-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = weights.topk(sampling.top_k, sorted=False).values.amin(dim=-1, keepdim=True)
        weights.masked_fill_(weights < floor, 0.0)
    if sampling.top_p < 1:
        weights.masked_fill_(weights < _nucleus_floor(weights, sampling.top_p), 0.0)
    return SampledTokens(*inverse_sample(weights, uniform), weights > 0 if with_candidates else _no_candidates(logits))


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """Return [R, 1] the smallest weight in the smallest set of tokens whose mass reaches `top_p`.

    A token is in the set if the mass before it is below the goal. The set is usually small, so the largest 256 weights
    are tried first, then eight times as many until the set of every row fits.
    """
    goal = weights.sum(dim=-1, keepdim=True) * top_p
    count = 256
    while True:
        largest = weights.topk(min(count, weights.shape[-1])).values
        inside = largest.cumsum(dim=-1) - largest < goal
        if count >= weights.shape[-1] or not inside[:, -1].any():
            return largest.masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True)
        count *= 8
