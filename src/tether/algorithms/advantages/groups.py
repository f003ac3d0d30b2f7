"""Statistics over the rows that answer the same prompt."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algorithms.masking import masked_sum
from tether.algorithms.shapes import GroupIds, Mask, RowIds, Rows, Tokens


@dataclass(frozen=True)
class Groups:
    """Groups of rows. Every statistic has one entry per row, the value for the row's group.

    A row without a valid token (its reward failed, or nothing was sampled) is ignored in all statistics.
    """

    member: RowIds
    """The index of each row's group, from 0 to ``count - 1``."""
    valid: Bool[Tensor, " B"]
    count: int

    @classmethod
    def of(cls, uid: GroupIds, response_mask: Mask) -> "Groups":
        """Group rows by equal uid, in any order; groups may differ in size."""
        if not isinstance(uid, Tensor):
            uid = torch.tensor(_group_indices(uid), dtype=torch.long, device=response_mask.device)
        labels, member = torch.unique(uid, return_inverse=True)
        return cls(member, response_mask.bool().any(dim=-1), labels.numel())

    def sum(self, values: Float[Tensor, " B *shape"]) -> Float[Tensor, " B *shape"]:
        """Return the sum over the valid rows of the group."""
        values = torch.where(self.valid.view(-1, *[1] * (values.ndim - 1)), values, 0.0)
        total = values.new_zeros(self.count, *values.shape[1:])
        return total.index_add(0, self.member, values)[self.member]

    def max(self, values: Rows) -> Rows:
        """Return the maximum over the valid rows of the group."""
        lowest = values.new_full((self.count,), -torch.inf)
        valid_values = torch.where(self.valid, values, -torch.inf)
        return lowest.scatter_reduce(0, self.member, valid_values, "amax")[self.member]

    def size(self) -> Int[Tensor, " B"]:
        """Return the number of valid rows of the group."""
        return self.sum(self.valid.to(torch.float32)).long()

    def centre(self, scores: Rows) -> Rows:
        """Subtract the group's mean; groups with equal scores, and groups of one, give exactly 0."""
        # Shifted by the group's maximum, equal scores have no rounding error that a small std could amplify.
        shifted = torch.where(self.valid, scores - self.max(scores), 0.0)
        return torch.where(self.valid, shifted - self.sum(shifted) / self.size().clamp(min=1), 0.0)

    def over_mean(self, scores: Rows) -> Rows:
        """Subtract the group's mean like `centre`, but keep the score of a group of one, which has no baseline."""
        return torch.where(self.size() > 1, self.centre(scores), scores)

    def std(self, scores: Rows) -> Rows:
        """Return the unbiased standard deviation of the group; 1 for a group of one."""
        size = self.size()
        variance = self.sum(self.centre(scores).square()) / (size - 1).clamp(min=1)
        return torch.where(size > 1, variance.sqrt(), 1.0)


def _group_indices(uid: Iterable[object]) -> list[int]:
    """Return one integer per label; equal labels have the same integer."""
    indices: dict[Hashable, int] = {}
    member = []
    for row, element in enumerate(uid):
        label = element.item() if isinstance(element, Tensor | np.generic) else element
        if not isinstance(label, Hashable) or label != label:
            raise ValueError(f"uid: row {row} is {element!r}; expected a hashable value that is equal to itself")
        member.append(indices.setdefault(label, len(indices)))
    return member


def score_groups(token_level_rewards: Tokens, response_mask: Mask, uid: GroupIds) -> tuple[Rows, Groups]:
    """Sum the rewards over the tokens of each row, and group the rows."""
    return masked_sum(token_level_rewards, response_mask, dim=-1), Groups.of(uid, response_mask)


def informative_rows(scores: Rows, response_mask: Mask, uid: GroupIds) -> Bool[Tensor, " B"]:
    """Return the valid rows whose group has different scores; all others have advantage 0 (for dynamic sampling)."""
    groups = Groups.of(uid, response_mask)
    scores = torch.where(groups.valid, scores, 0.0)
    # NaN differs from itself, so a group with NaN counts as informative and the NaN stays visible.
    return groups.valid & (groups.max(scores) != -groups.max(-scores))
