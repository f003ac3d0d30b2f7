"""Random batches on which everything is compared. A check sees one case and takes the fields that it needs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

SCENARIOS = {
    "ragged": "answers of different lengths, groups of 2 to 5",
    "tools": "observations between the policy's tokens, with their own values and log-probabilities but no reward",
    "lone": "ragged, and the first group has one answer",
    "empty": "ragged, and one answer has no tokens, but a score at its first position",
    "equal": "all answers of a group have the same score, float32",
    "far": "log-probabilities up to 60 apart",
    "poison": "ragged, with NaN at every masked position",
}
GROUPS = (5, 4, 3, 2)
WIDTH = 10
SEEDS = range(5)


@dataclass(frozen=True)
class Case:
    """One batch: B = 14 rows of up to T = 10 tokens, in groups that are not contiguous; float64 unless cast."""

    scenario: str
    seed: int
    mask: Tensor
    """[B, T] bool."""
    uid: Tensor
    """[B] int64: the group of each row."""
    scores: Tensor
    """[B]."""
    rewards: Tensor
    """[B, T]: the score at the last token of each row."""
    dense_rewards: Tensor
    """[B, T]: a reward at every token; 0 outside the mask."""
    values: Tensor
    old_values: Tensor
    returns: Tensor
    advantages: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    rollout_log_probs: Tensor
    sum_pi_squared: Tensor
    weights: Tensor
    """[B, T] importance weights, around 1."""
    components: Tensor
    """[B, 3]: the components of a score."""
    logits: Tensor
    """[B, T, V]."""
    ref_logits: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """Cast every floating tensor."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{k: v.to(dtype) for k, v in tensors.items() if isinstance(v, Tensor) and v.is_floating_point()}
        )

    def with_equal_groups(self) -> Case:
        """Two groups of seven, one after the other, for peers that know no other."""
        uid = torch.arange(14) // 7
        scores, rewards = self.scores, self.rewards
        if self.scenario == "equal":
            scores = scores[uid]
            rewards = torch.where(rewards == 0, 0.0, scores[:, None])
        return replace(self, uid=uid, scores=scores, rewards=rewards)

    @property
    def uid_names(self) -> list[str]:
        """The groups as verl names them: strings."""
        return [f"prompt-{number}" for number in self.uid.tolist()]


def make_case(scenario: str, seed: int) -> Case:
    """Draw the batch of a scenario; the same arguments give the same numbers."""
    g = torch.Generator().manual_seed(1000 * seed + list(SCENARIOS).index(scenario))
    sizes = (1, *GROUPS) if scenario == "lone" else GROUPS
    uid = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = uid.numel()
    uid = uid[torch.randperm(rows, generator=g)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def log_probs(spread: float) -> Tensor:
        return -torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) * spread - 0.05

    lengths = torch.randint(2, WIDTH + 1, (rows,), generator=g)
    if scenario == "empty":
        lengths[3] = 0
    mask = torch.arange(WIDTH) < lengths[:, None]
    if scenario == "tools":
        inner = (torch.arange(WIDTH) > 0) & (torch.arange(WIDTH) < lengths[:, None] - 1)
        mask = mask & ~(inner & (torch.rand(rows, WIDTH, generator=g) < 0.4))
    scores = normal(rows)
    if scenario == "equal":
        scores = normal(len(sizes))[uid]
    rewards = torch.zeros(rows, WIDTH, dtype=torch.float64)
    rewards[torch.arange(rows), (lengths - 1).clamp(min=0)] = scores
    old = log_probs(2.0)
    far = 60.0 if scenario == "far" else 0.6
    case = Case(
        scenario,
        seed,
        mask,
        uid,
        scores,
        rewards,
        dense_rewards=torch.where(mask, normal(rows, WIDTH), 0.0),
        values=normal(rows, WIDTH),
        old_values=normal(rows, WIDTH),
        returns=normal(rows, WIDTH),
        advantages=normal(rows, WIDTH),
        log_probs=old + far * (torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) - 0.5) * 2,
        old_log_probs=old,
        ref_log_probs=old + far * (torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) - 0.5) * 2,
        rollout_log_probs=old + far * (torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) - 0.5),
        sum_pi_squared=torch.rand(rows, WIDTH, generator=g, dtype=torch.float64),
        weights=0.5 + torch.rand(rows, WIDTH, generator=g, dtype=torch.float64),
        components=normal(rows, 3),
        logits=2 * normal(rows, WIDTH, 7),
        ref_logits=2 * normal(rows, WIDTH, 7),
    )
    return _poisoned(case) if scenario == "poison" else case.to(torch.float32) if scenario == "equal" else case


def _poisoned(case: Case) -> Case:
    tokens = {field.name: getattr(case, field.name) for field in fields(case) if field.name != "mask"}
    tokens = {k: v for k, v in tokens.items() if isinstance(v, Tensor) and v.shape == case.mask.shape}
    return replace(case, **{name: torch.where(case.mask, tensor, torch.nan) for name, tensor in tokens.items()})
