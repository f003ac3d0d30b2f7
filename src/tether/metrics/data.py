"""Metrics of a batch: rewards, advantages, values, lengths, statistics of the estimators, and the mismatch between
sampler and trainer.

Legend: B = rows, T = response positions, N = positions where the policy sampled (``response_mask``). Every statistic
    first selects the valid entries and then reduces them in float64, so that values outside the mask have no effect. A
    statistic without valid entries is omitted from the result.
"""

from __future__ import annotations

from collections import Counter

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.batch import TrainBatch, filled

MAX_LOG_RATIO = 20.0
"""Bound on the log ratio, so that the exp of a single token cannot overflow the k3 estimate."""
NGRAM = 4
"""Length of the n-grams whose repetitions are counted."""


def data_metrics(batch: TrainBatch, *, max_prompt_length: int) -> dict[str, float]:
    """Return metrics of a finished batch; metrics of fields that are None are omitted.

    Args:
        batch: a batch with `token_level_scores` and the fields that the step has computed.
        max_prompt_length: limit for `prompt_length/clip_ratio`, in tokens.
    """
    mask, scored = batch.response_mask, batch.scored
    metrics = _spread("critic/score", _row_sums(batch.token_level_scores, mask)[scored])
    if batch.token_level_rewards is not None:
        metrics |= _spread("critic/rewards", _row_sums(batch.token_level_rewards, mask)[scored])
    for name in ("advantages", "returns", "values"):
        per_token = getattr(batch, name)
        if per_token is not None:
            metrics |= _spread(f"critic/{name}", per_token[mask])
    if batch.kept is not None:
        metrics |= _spread("training/rollout_kept_tokens", batch.kept.count[mask])
    metrics["reward/excluded_rows"] = float((~scored).sum())
    metrics |= identical_replies(batch) | repeated_sequences(batch)
    return metrics | length_metrics(
        batch.prompt_length, batch.response_length, batch.truncated, max_prompt_length=max_prompt_length
    )


def length_metrics(
    prompt_length: Int[Tensor, " B"],
    response_length: Int[Tensor, " B"],
    truncated: Bool[Tensor, " B"],
    *,
    max_prompt_length: int,
) -> dict[str, float]:
    """Return lengths in tokens, and the fractions of truncated responses and of prompts that reach the limit."""
    return {
        **_spread("response_length", response_length),
        "response_length/clip_ratio": truncated.double().mean().item(),
        **_spread("prompt_length", prompt_length),
        "prompt_length/clip_ratio": (prompt_length >= max_prompt_length).double().mean().item(),
    }


def group_metrics(scores: Float[Tensor, " B"], uid: Int[Tensor, " B"], scored: Bool[Tensor, " B"]) -> dict[str, float]:
    """Return the spread of scores among the responses to one prompt, over groups with at least two scored responses.

    Args:
        scores: [B] score of each response; ignored where not `scored`.
        uid: [B] prompt group.
        scored: [B] False where the reward abstained or failed.
    """
    groups = [scores[scored & (uid == group)].double() for group in uid.unique()]
    stds = [
        group.std(correction=0).item() if bool((group != group[0]).any()) else 0.0 for group in groups if len(group) > 1
    ]
    if not stds:
        return {}
    return {"group/zero_std_fraction": stds.count(0.0) / len(stds), "group/score_std_mean": sum(stds) / len(stds)}


def identical_replies(batch: TrainBatch) -> dict[str, float]:
    """Return the fraction of scored responses equal to the most frequent one; empty without two different prompts."""
    rows = batch.scored.nonzero().flatten().tolist()
    prompts = _rows_as_bytes(batch.prompt_ids, batch.prompt_length, rows)
    replies = _rows_as_bytes(batch.response_ids, batch.response_length, rows)
    if len(set(prompts)) < 2:
        return {}
    return {"response/identical_fraction": max(Counter(replies).values()) / len(replies)}


def repeated_sequences(batch: TrainBatch) -> dict[str, float]:
    """Return the fraction of a response's 4-grams that already occurred earlier in it, as a mean over scored responses.

    This is 1 - distinct / all (1 - distinct-n of Li et al. 2016); empty where no response has four consecutive tokens.
    "abababab" has five 4-grams, of which two are distinct: 0.6.
    """
    mask = batch.response_mask & batch.scored[:, None]
    if mask.shape[1] < NGRAM:
        return {}
    complete = mask.unfold(1, NGRAM, 1).all(dim=-1)  # [B, W]; no n-gram contains tokens of a tool
    count = complete.sum(dim=-1)
    codes = torch.zeros_like(batch.response_ids[:, NGRAM - 1 :])
    for first in range(NGRAM):  # a 64-bit hash, with wrap-around
        codes = codes * 6364136223846793005 + batch.response_ids[:, first : first + codes.shape[1]] + 1
    ordered = codes.masked_fill(~complete, 0).sort(dim=-1).values
    distinct = 1 + (ordered.diff(dim=-1) != 0).sum(dim=-1) - (count < complete.shape[1]).long()
    rows = count > 0
    return _mean("response/repeated_fraction", 1 - distinct[rows].double() / count[rows])


def mismatch_metrics(
    rollout_log_probs: Float[Tensor, "B T"], old_log_probs: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> dict[str, float]:
    """Return distances between the log-probabilities of sampler and trainer for the same weights and tokens.

    With x = log p_trainer - log p_sampler of a sampled token, KL(sampler || trainer) is estimated by k1 = -x and by k3
    = exp(x) - 1 - x (Schulman, "Approximating KL Divergence", 2020).
    """
    sampler, trainer = rollout_log_probs[response_mask].double(), old_log_probs[response_mask].double()
    if not len(sampler):
        return {}
    difference = (sampler.exp() - trainer.exp()).abs()
    log_ratio = (trainer - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": _correlation(sampler.exp(), trainer.exp()),
        "rollout_corr/kl": -log_ratio.mean().item(),
        "rollout_corr/k3_kl": (log_ratio.expm1() - log_ratio).mean().item(),
    }


def _rows_as_bytes(ids: Int[Tensor, "B S"], lengths: Int[Tensor, " B"], rows: list[int]) -> list[bytes]:
    table, sizes = ids.cpu().numpy(), lengths.tolist()
    return [table[row, : sizes[row]].tobytes() for row in rows]


def _row_sums(per_token: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    return torch.where(mask, per_token, 0.0).double().sum(dim=-1)


def _spread(prefix: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }


def _correlation(x: Float[Tensor, " N"], y: Float[Tensor, " N"]) -> float:
    """Return Pearson's coefficient; where a constant side leaves it undefined, 1 if both are equal, else 0."""
    x_centered, y_centered = x - x.mean(), y - y.mean()
    scale = x_centered.norm() * y_centered.norm()
    if scale == 0:
        return float(torch.equal(x, y))
    return (x_centered @ y_centered / scale).item()


def estimator_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of a finished batch's advantages, and of the optional fields that its estimator needs."""
    mask, scored = batch.response_mask, batch.scored
    metrics = _mean("critic/score/nonzero_fraction", _row_sums(batch.token_level_scores, mask)[scored] != 0)
    if batch.advantages is not None:
        metrics |= _mean("critic/advantages/nonzero_fraction", batch.advantages[mask] != 0)
    _, sizes = batch.uid[scored].unique(return_counts=True)
    metrics |= _mean("group/single_fraction", sizes == 1)
    if batch.sum_pi_squared is not None:
        metrics |= _mean("actor/sum_pi_squared", batch.sum_pi_squared[mask])
    if batch.bootstrap_values is not None:
        metrics |= _mean("critic/bootstrap_value_mean", batch.bootstrap_values[scored & batch.truncated])
    if batch.reward_baselines is not None:
        beaten = _row_sums(filled(batch.token_level_rewards), mask) > batch.reward_baselines
        metrics |= _mean("baseline/beaten_fraction", beaten[scored])
    return metrics


def _mean(key: str, values: Tensor) -> dict[str, float]:
    return {key: values.double().mean().item()} if len(values) else {}
