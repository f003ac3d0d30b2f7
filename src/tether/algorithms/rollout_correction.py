"""Corrections for a sampler whose probabilities differ from those of the trained policy.

All formulas use the ratio rho = p / p_rollout of each token, where p is the recomputed policy (``old_log_probs``) and
p_rollout the sampler. Importance weights multiply a token's loss; rejection removes tokens or rows from the mask before
advantages and denominators are computed, so that they have no effect.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algorithms.aggregation import MAX_LOG_RATIO, Max, Mean, Metric, Min
from tether.algorithms.masking import largest, masked_mean, masked_sum, masked_var, select
from tether.algorithms.registry import Positive
from tether.algorithms.shapes import Mask, Rows, Tokens

RejectionBounds = Mapping[str, tuple[float, float]]
"""(lower, upper) bound of each rejection mode of `rejection_mask`."""


@torch.no_grad()
def importance_weights(
    log_probs: Tokens,
    rollout_log_probs: Tokens,
    response_mask: Mask,
    *,
    level: str,
    threshold: Positive = 2.0,
    threshold_lower: Positive | None = None,
    batch_normalize: bool = False,
) -> Tokens:
    """Compute truncated importance weights, without gradient; 0 outside the mask (Yao et al. 2025, "truncated IS").

    With a lower bound, weights outside of the bounds become 0, so that their tokens contribute no gradient but stay in
    the denominators (IcePop, Ling Team 2025, with bounds of 0.5 and 5). A token with probability 0 under both policies
    (-inf and -inf) has ratio 1, since they agree. NaN stays NaN.

    Assumes: the sampler's probability of every token is positive and close to the trainer's.
    Use it: ``token`` where the mismatch comes from rounding; ``sequence`` where the estimate must be unbiased and
        answers are short.
    Watch: `training/rollout_probs_diff_mean`, `rollout_corr/kl`, and the effective sample size: near 0, a few rows have
        nearly all the weight.
    Keys: `algorithm.rollout_correction.rollout_is`, `algorithm.rollout_correction.rollout_is_threshold`,
        `algorithm.rollout_correction.rollout_is_batch_normalize`.

    Args:
        log_probs: log p of each token.
        rollout_log_probs: log p_rollout of each token.
        response_mask: the policy's tokens.
        level: ``token``: min(rho_t, threshold), biased, of low variance. ``sequence``: min(prod_t rho_t, threshold) at
            each token of the row, which is unbiased except for the truncation.
        threshold: upper bound, to which larger weights are truncated.
        threshold_lower: lower bound; weights outside of both bounds are 0.
        batch_normalize: divide by the mean over the batch (``token``: of tokens; ``sequence``: of rows), which requires
            the full batch, before any split.

    Raises:
        ValueError: the level is unknown.
    """
    ratio = _ratio(log_probs, rollout_log_probs, response_mask, level)
    weights = _limited(ratio, threshold, threshold_lower)
    if batch_normalize:
        weights = weights / _batch_mean(weights, response_mask, level)
    return weights


@torch.no_grad()
def importance_metrics(
    log_probs: Tokens,
    rollout_log_probs: Tokens,
    response_mask: Mask,
    *,
    level: str,
    threshold: Positive = 2.0,
    threshold_lower: Positive | None = None,
) -> dict[str, float]:
    """Return metrics of the unnormalised weights of `importance_weights` over the full batch.

    They are the metrics of `importance_statistics`, plus metrics that cannot be summed over micro-batches: the standard
    deviations of the truncated weights, and their effective sample size 1 / mean((w / mean w)^2).
    """
    mask, rows = response_mask.bool(), response_mask.bool().any(dim=-1)
    tokens = _limited(_ratio(log_probs, rollout_log_probs, mask, level), threshold, threshold_lower)
    row_mean = masked_mean(tokens, mask, dim=-1)
    weights, valid = (row_mean, rows) if level == "sequence" else (tokens, mask)
    mean = masked_mean(weights, valid)
    normalized = weights / mean.clamp(min=1e-8)
    spread = {
        "std": masked_mean((weights - mean).square(), valid).sqrt(),
        "eff_sample_size": 1 / masked_mean(normalized.square(), valid).clamp(min=1e-8),
        "seq_std": masked_var(row_mean, rows).sqrt(),
    }
    statistics = importance_statistics(
        log_probs, rollout_log_probs, mask, level=level, threshold=threshold, threshold_lower=threshold_lower
    )
    return {name: float(value) for name, value in statistics.items()} | {
        f"rollout_corr/rollout_is_{name}": float(value) for name, value in spread.items()
    }


@torch.no_grad()
def importance_statistics(
    log_probs: Tokens,
    rollout_log_probs: Tokens,
    response_mask: Mask,
    *,
    level: str,
    threshold: Positive = 2.0,
    threshold_lower: Positive | None = None,
) -> dict[str, Metric]:
    """Return metrics of the unnormalised weights of `importance_weights` that can be summed over micro-batches.

    There is one weight per token or, for level ``sequence``, per row; ``seq_*`` describes the mean weight of each row.
    """
    # As in verl, metrics use the truncated weights, except for the fractions above and below the bounds and, for level
    # ``sequence``, the largest and smallest weight, where truncation would hide what it removed.
    mask, rows = response_mask.bool(), response_mask.bool().any(dim=-1)
    ratio = _ratio(log_probs, rollout_log_probs, mask, level)
    tokens = _limited(ratio, threshold, threshold_lower)
    lowest = 1 / threshold if threshold_lower is None else threshold_lower
    row_ratio, row_mean = masked_mean(ratio, mask, dim=-1), masked_mean(tokens, mask, dim=-1)
    is_sequence = level == "sequence"
    ratios, weights, extremes = (row_ratio, row_mean, row_ratio) if is_sequence else (ratio, tokens, tokens)
    valid = rows if is_sequence else mask
    metrics: dict[str, Metric] = {
        "mean": Mean.of(weights, valid),
        "max": Max.of(extremes, valid),
        "min": Min.of(extremes, valid),
        "ratio_fraction_high": Mean.of(ratios > threshold, valid),
        "ratio_fraction_low": Mean.of(ratios < lowest, valid),
        "seq_mean": Mean.of(row_mean, rows),
        "seq_max": Max.of(row_mean, rows),
        "seq_min": Min.of(row_mean, rows),
        "seq_max_deviation": Max.of((row_mean - 1).abs(), rows),
        "seq_fraction_high": Mean.of(row_ratio > threshold, rows),
        "seq_fraction_low": Mean.of(row_ratio < lowest, rows),
        "batch_norm_factor": Mean.of(weights, valid),
    }
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}


_TOKEN_DIVERGENCES: dict[str, Callable[[Tokens], Tokens]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}

REJECTION_MODES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


def parse_weight_bounds(rollout_is_threshold: float | str) -> tuple[float | None, float]:
    """Parse verl's ``rollout_is_threshold`` into (threshold_lower, threshold) of `importance_weights`.

    A number is an upper bound; the form ``lower_upper`` gives both bounds.

    Raises:
        ValueError: a bound is not a positive finite number, or the lower bound exceeds the upper one.
    """
    try:
        bounds = [float(text) for text in str(rollout_is_threshold).split("_")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not all(0 < bound < math.inf for bound in bounds) or bounds[0] > bounds[-1]:
        raise ValueError(
            f"rollout_is_threshold: {rollout_is_threshold!r} is no bound of weights. Give a number above 0, or "
            "lower_upper"
        )
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


def parse_rejection(rollout_rs: str, rollout_rs_threshold: float | str) -> dict[str, tuple[float, float]]:
    """Parse verl's ``rollout_rs`` and ``rollout_rs_threshold`` into bounds for `rejection_mask`.

    Modes and thresholds are comma-separated lists of the same length; a single threshold applies to all modes. A
    threshold is an upper bound; for k1, ``lower_upper`` are bounds of the inverse ratio 1 / rho, and a single u means
    1/u to u.

    Raises:
        ValueError: a mode is unknown or listed twice, a threshold is not a positive finite number, or the number of
            thresholds is wrong.
    """
    modes = [mode.strip() for mode in rollout_rs.split(",")]
    thresholds = [threshold.strip() for threshold in str(rollout_rs_threshold).split(",")]
    _check_modes(modes)
    if repeated := [mode for mode in modes if modes.count(mode) > 1]:
        raise ValueError(f"rollout_rs: {repeated[0]} is named twice. Name each mode once, with one threshold")
    if len(thresholds) == 1:
        thresholds *= len(modes)
    if len(thresholds) != len(modes):
        raise ValueError(
            f"rollout_rs_threshold: {len(thresholds)} thresholds for {len(modes)} modes. Give 1 or as many"
        )
    return {mode: _bounds(mode, threshold) for mode, threshold in zip(modes, thresholds, strict=True)}


def rejection_mask(
    log_probs: Tokens, rollout_log_probs: Tokens, response_mask: Mask, bounds: RejectionBounds
) -> Bool[Tensor, "B T"]:
    """Return the mask without the tokens and rows that diverge too much from the sampler.

    With x = log rho, clamped to +-20, a token's divergence is k1 = -x, k2 = x^2 / 2 or k3 = exp(x) - 1 - x. A mode
    keeps a token (``token_*``), or all tokens of a row (``seq_sum_*``, ``seq_mean_*``, ``seq_max_*``: its sum, mean,
    largest), whose divergence is within the mode's bounds; a token is kept if all modes keep it. Bounds of k1 are
    bounds of 1 / rho, and their logarithms are compared with k1: (0.5, 5) keeps rho from 0.2 to 2, as in verl. (NeMo RL
    and AReaL bound rho.)

    Assumes: few tokens or rows diverge, and losing them costs less than training on them.
    Use it: ``seq_*`` where one bad token invalidates its row, ``token_*`` otherwise; with or without importance
        weights.
    Watch: the rejected fraction: above a few percent, the sampler probably has a bug. `rollout_corr/k3_kl`.
    Keys: `algorithm.rollout_correction.rollout_rs`, `algorithm.rollout_correction.rollout_rs_threshold`.
    """
    mask = response_mask.bool()
    accepted = mask
    for mode, (lower, upper) in _checked(bounds).items():
        divergence = _divergence(mode, log_probs, rollout_log_probs, mask)
        if mode.endswith("k1"):
            lower, upper = math.log(lower), math.log(upper)
        accepted = accepted & (divergence >= lower) & (divergence <= upper)
    return accepted


def veto_mask(
    log_probs: Tokens, rollout_log_probs: Tokens, response_mask: Mask, threshold: Positive
) -> Bool[Tensor, "B T"]:
    """Return the mask without rows in which the rho of any token is below the threshold (verl's token veto).

    A NaN rho also removes its row, as does a token with probability 0 under both policies, which cannot have been
    sampled.
    """
    # A token that the policy would almost never sample shows that the policy did not produce the row. rho is not
    # clamped, so that thresholds far below exp(-20) still work.
    mask = response_mask.bool()
    log_ratio = select(log_probs, mask) - select(rollout_log_probs, mask)
    vetoed = (mask & ~(log_ratio >= math.log(threshold))).any(dim=-1, keepdim=True)  # also true for NaN
    return mask & ~vetoed


@torch.no_grad()
def rejection_metrics(
    log_probs: Tokens, rollout_log_probs: Tokens, response_mask: Mask, bounds: RejectionBounds
) -> dict[str, float]:
    """Return metrics of `rejection_mask`: fractions of rejected tokens and of rows with any, in total and per mode."""
    mask, rows = response_mask.bool(), response_mask.bool().any(dim=-1)
    metrics: dict[str, float] = {}
    for mode, bound in _checked(bounds).items():
        divergence = _divergence(mode, log_probs, rollout_log_probs, mask).expand(mask.shape)
        accepted = rejection_mask(log_probs, rollout_log_probs, mask, {mode: bound})
        prefix = f"rollout_corr/rollout_rs_{mode}"
        metrics[f"{prefix}_mean"] = float(masked_mean(divergence, mask))
        metrics[f"{prefix}_max"] = _largest(divergence, mask)
        metrics[f"{prefix}_masked_fraction"] = _fraction(~accepted, mask)
        metrics[f"{prefix}_seq_masked_fraction"] = _fraction((mask & ~accepted).any(dim=-1), rows)
    accepted = rejection_mask(log_probs, rollout_log_probs, mask, bounds)
    metrics["rollout_corr/rollout_rs_masked_fraction"] = _fraction(~accepted, mask)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _fraction((mask & ~accepted).any(dim=-1), rows)
    return metrics


@torch.no_grad()
def off_policy_metrics(log_probs: Tokens, rollout_log_probs: Tokens, response_mask: Mask) -> dict[str, float]:
    """Return metrics of the distance between trainer and sampler, by verl's names.

    ``ppl`` is the perplexity of a row's own tokens, averaged over rows; ``log_ppl_diff`` is the trainer's log
    perplexity minus the sampler's; ``kl`` and ``k3_kl`` estimate KL(sampler || trainer) per token; ``chi2`` is
    mean(rho^2) - 1 over tokens, or over rows with rho the product over the row.
    """
    mask, rows = response_mask.bool(), response_mask.bool().any(dim=-1)
    token_difference = _log_ratio(log_probs, rollout_log_probs, mask)
    log_ratio = _bounded(token_difference)
    trainer = -masked_mean(log_probs, mask, dim=-1)
    sampler = -masked_mean(rollout_log_probs, mask, dim=-1)
    difference = trainer - sampler
    row_log_ratio = _bounded(token_difference.sum(dim=-1))
    metrics: dict[str, Tensor | float] = {
        "training_ppl": masked_mean(trainer.exp(), rows),
        "training_log_ppl": masked_mean(trainer, rows),
        "rollout_ppl": masked_mean(sampler.exp(), rows),
        "rollout_log_ppl": masked_mean(sampler, rows),
        "kl": masked_mean(-token_difference, mask),
        "k3_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": _largest(difference, rows),
        "log_ppl_diff_min": -_largest(-difference, rows),
        "ppl_ratio": masked_mean(difference.exp(), rows),
        "chi2_token": masked_mean((2 * log_ratio).exp() - 1, mask),
        "chi2_seq": masked_mean((2 * row_log_ratio).exp() - 1, rows),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def _ratio(log_probs: Tokens, rollout_log_probs: Tokens, response_mask: Mask, level: str) -> Tokens:
    log_ratio = _log_ratio(log_probs, rollout_log_probs, response_mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f"rollout_is: unknown level {level!r}. Use token or sequence")
    return select(_bounded(log_ratio).exp(), response_mask)


def _limited(ratio: Tokens, threshold: float, threshold_lower: float | None) -> Tokens:
    if threshold_lower is None:
        return ratio.clamp(max=threshold)
    return ratio.masked_fill((ratio < threshold_lower) | (ratio > threshold), 0.0)


def _log_ratio(log_probs: Tokens, rollout_log_probs: Tokens, response_mask: Mask) -> Tokens:
    """Return the unclamped log ratio of each token; 0 if both policies give the token probability 0."""
    # Callers clamp it, or its sum over a row, in which other tokens may compensate for an extreme one.
    trainer, sampler = select(log_probs, response_mask), select(rollout_log_probs, response_mask)
    return torch.where(trainer.isneginf() & sampler.isneginf(), 0.0, trainer - sampler)


def _bounded(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _batch_mean(weights: Tokens, response_mask: Mask, level: str) -> Float[Tensor, ""]:
    if level == "token":
        return masked_mean(weights, response_mask).clamp(min=1e-8)
    rows = response_mask.bool().any(dim=-1)
    return masked_mean(masked_mean(weights, response_mask, dim=-1), rows).clamp(min=1e-8)


def _check_modes(modes: Iterable[str]) -> None:
    if unknown := [mode for mode in modes if mode not in REJECTION_MODES]:
        raise ValueError(f"rollout_rs: unknown mode {unknown[0]!r}. Use any of: {', '.join(REJECTION_MODES)}")


def _checked(bounds: RejectionBounds) -> RejectionBounds:
    _check_modes(bounds)
    for mode, (lower, upper) in bounds.items():
        is_ratio = mode.endswith("k1")
        if not lower <= upper or (is_ratio and lower <= 0):
            expected = "0 < lower <= upper" if is_ratio else "lower <= upper"
            raise ValueError(f"rollout_rs: bounds ({lower}, {upper}) of {mode}; expected {expected}")
    return bounds


def _bounds(mode: str, threshold: str) -> tuple[float, float]:
    problem = f"rollout_rs_threshold: {threshold!r} for {mode}"
    lower, _, upper = threshold.rpartition("_")
    if lower and not mode.endswith("k1"):
        raise ValueError(f"{problem}, which has no lower bound. Give one number")
    try:
        numbers = [float(text) for text in (lower, upper) if text]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{problem}. Give a positive number, for k1 also lower_upper")
    if not mode.endswith("k1"):
        return -math.inf, numbers[0]
    low, high = numbers if lower else (1 / numbers[0], numbers[0])
    if low > high:
        raise ValueError(f"{problem}: the lower bound {low:g} is above the upper one {high:g}. Give a ratio over 1")
    return low, high


def _divergence(
    mode: str, log_probs: Tokens, rollout_log_probs: Tokens, mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " B #T"]:
    level, _, kind = mode.rpartition("_")
    tokens = select(_TOKEN_DIVERGENCES[kind](_bounded(_log_ratio(log_probs, rollout_log_probs, mask))), mask)
    reductions: dict[str, Callable[[], Rows]] = {
        "seq_sum": lambda: masked_sum(tokens, mask, dim=-1),
        "seq_mean": lambda: masked_mean(tokens, mask, dim=-1),
        # k2 and k3 are at least 0, so zeros for masked tokens and for empty rows do not change the maximum.
        "seq_max": lambda: torch.nn.functional.pad(tokens, (0, 1)).amax(dim=-1),
    }
    return tokens if level == "token" else reductions[level]()[:, None]


def _largest(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> float:
    return float(largest(values, mask))


def _fraction(hit: Bool[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> float:
    return float(masked_mean(hit.float(), mask))
