"""Random batches for the property tests: ragged masks with observations in the middle, an empty row, odd groups."""

from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

PER_ROW = {"uid", "reward_baselines", "bootstrap_values", "reward_components"}


@dataclass(frozen=True)
class Case:
    """Everything that an estimator or a loss can ask for, in float64."""

    mask: Tensor
    rewards: Tensor
    values: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    sum_pi_squared: Tensor
    rollout_is_weights: Tensor
    selected: Tensor
    uid: Tensor
    reward_baselines: Tensor
    bootstrap_values: Tensor
    reward_components: Tensor

    @property
    def estimator_inputs(self) -> dict[str, Tensor]:
        names = ("values", "uid", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
        more = ("reward_baselines", "bootstrap_values", "reward_components")
        return {name: getattr(self, name) for name in (*names, *more)}

    @property
    def loss_inputs(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("selected", "rollout_log_probs", "rollout_is_weights")}

    def rows(self, index: Tensor) -> "Case":
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def poisoned(self, poison: float) -> "Case":
        """The same valid entries, with the poison at every masked token and at everything of an empty row."""
        dead_row = ~self.mask.any(dim=-1)
        changed = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if not tensor.is_floating_point():
                continue
            per_token = field.name not in PER_ROW
            dead = ~self.mask if per_token else dead_row.view(-1, *[1] * (tensor.ndim - 1))
            changed[field.name] = torch.where(dead, poison, tensor)
        return replace(self, **changed)

    def with_column(self, at: int) -> "Case":
        """The same tokens, with one more masked position in front of position `at`."""
        changed = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name not in PER_ROW:
                new = torch.full_like(tensor[:, :1], False if tensor.dtype == torch.bool else 3.0)
                changed[field.name] = torch.cat([tensor[:, :at], new, tensor[:, at:]], dim=1)
        return replace(self, **changed)


def make_case(seed: int, rows: int = 7, width: int = 5) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def flags(chance: float) -> Tensor:
        return torch.rand(rows, width, generator=generator) < chance

    mask = flags(0.7)
    mask[rows // 2] = False
    log_probs = -normal(rows, width).abs()
    return Case(
        mask=mask,
        rewards=normal(rows, width),
        values=normal(rows, width),
        log_probs=log_probs,
        old_log_probs=log_probs + 0.3 * normal(rows, width),
        rollout_log_probs=log_probs + 0.3 * normal(rows, width),
        ref_log_probs=log_probs + 0.3 * normal(rows, width),
        advantages=normal(rows, width),
        sum_pi_squared=torch.rand(rows, width, generator=generator, dtype=torch.float64),
        rollout_is_weights=torch.rand(rows, width, generator=generator, dtype=torch.float64) + 0.5,
        selected=flags(0.3),
        uid=torch.randint(3, (rows,), generator=generator) * 17 - 5,
        reward_baselines=normal(rows),
        bootstrap_values=normal(rows),
        reward_components=normal(rows, 2),
    )


CASES = st.builds(make_case, st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 5))
