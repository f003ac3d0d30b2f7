"""Concatenation of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import NonTensorStack
from torch import Tensor
from torch.nn.functional import pad

from tether.batch import KeptTokens, RolloutBatch


def join_rollouts(rollouts: Sequence[RolloutBatch], groups: Sequence[int]) -> RolloutBatch:
    """Concatenate the rows of rollouts, padded to the longest prompt and response among them.

    Args:
        rollouts: at least one, all sampled with the same settings.
        groups: for each rollout, the prompt group (`uid`) of all its rows in the result.
    """
    prompt_length = torch.cat([rollout.prompt_length for rollout in rollouts])
    response_length = torch.cat([rollout.response_length for rollout in rollouts])
    width = int(response_length.max())

    def by_token(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([_with_width(tensor, width) for tensor in tensors])

    versions = [rollout.policy_version for rollout in rollouts if rollout.policy_version is not None]
    by_rows = [_token_versions(rollout) for rollout in rollouts] if len(versions) == len(rollouts) else None
    changed = any(rollout.token_versions is not None for rollout in rollouts)
    scores = [rollout.turn_scores for rollout in rollouts if rollout.turn_scores is not None] or None
    experts = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    return RolloutBatch(
        uid=torch.cat([torch.full_like(r.uid, group) for r, group in zip(rollouts, groups, strict=True)]),
        prompt_ids=torch.cat([_with_width(r.prompt_ids, int(prompt_length.max())) for r in rollouts]),
        prompt_length=prompt_length,
        response_ids=by_token([rollout.response_ids for rollout in rollouts]),
        response_length=response_length,
        response_mask=by_token([rollout.response_mask for rollout in rollouts]),
        rollout_log_probs=by_token([rollout.rollout_log_probs for rollout in rollouts]),
        truncated=torch.cat([rollout.truncated for rollout in rollouts]),
        policy_version=torch.cat(versions) if by_rows is not None else None,
        token_versions=by_token(by_rows) if changed and by_rows is not None else None,
        turn_scores=None if scores is None else by_token(scores),
        kept=_join_kept([rollout.kept for rollout in rollouts if rollout.kept is not None], by_token),
        routed_experts=_join_experts(experts, int(prompt_length.max()) + width),
        batch_size=[len(response_length)],
    )


def _join_experts(experts: Sequence[Tensor], width: int) -> Tensor | None:
    """Concatenate [B, W, L, k] after padding with -1, which stands for unknown experts."""
    missing = [max(width - chosen.shape[1], 0) for chosen in experts]
    wide = [pad(x[:, :width], (0, 0, 0, 0, 0, padding), value=-1) for x, padding in zip(experts, missing, strict=True)]
    return torch.cat(wide) if wide else None


def _token_versions(rollout: RolloutBatch) -> Tensor:
    if rollout.token_versions is not None:
        return rollout.token_versions
    assert rollout.policy_version is not None
    return rollout.policy_version[:, None].expand(rollout.response_ids.shape)


def _join_kept(tokens: Sequence[KeptTokens], by_token: Callable[[Sequence[Tensor]], Tensor]) -> KeptTokens | None:
    if not tokens:
        return None
    words = [row for rollout in tokens for row in rollout.words]
    count = by_token([rollout.count for rollout in tokens])
    return KeptTokens(count=count, words=NonTensorStack(*words), batch_size=[len(words)])


def _with_width(tensor: Tensor, width: int) -> Tensor:
    """Return [B, W] as [B, width]: truncated, or padded with zeros."""
    return pad(tensor[:, :width], (0, max(width - tensor.shape[1], 0)))
