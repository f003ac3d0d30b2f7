"""Typed batches that flow through a training step.

Legend: B = rows (one sampled response each), P = prompt width, T = response width. Rows are right-padded, never
left-padded: row b holds prompt tokens ``prompt_ids[b, :prompt_length[b]]`` and then response tokens
``response_ids[b, :response_length[b]]``. What stands beyond a length or outside ``response_mask`` is never read.

Worked example, one prompt [5, 6, 7] sampled twice, answers [8, 2] and [9] (2 = end of sequence, width T = 3)::

    uid             [0, 0]                 both rows answer prompt 0 of the step
    prompt_ids      [[5, 6, 7], [5, 6, 7]]
    response_ids    [[8, 2, 0], [9, 0, 0]]
    response_mask   [[1, 1, 0], [1, 0, 0]]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorClass
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt dataset, ready to be sampled."""

    token_ids: tuple[int, ...]
    """The templated prompt, as the policy reads it."""
    data_source: str
    """Which reward scores it, for example ``openai/gsm8k``."""
    ground_truth: Any
    """What the reward compares the answer with; None where the reward needs none."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation before the chat template."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """The row's `extra_info`, passed to the reward as it is."""
    index: int = 0
    """Row number in the concatenated dataset: the sample's identity in logs."""


def filled(field: Tensor | None) -> Tensor:
    """A field of a `TrainBatch` that an earlier part of the step must have filled in."""
    assert field is not None, "this part of the step runs too early"
    return field


def last_valid(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the last position of each row where the mask is; nowhere in a row without any."""
    position = torch.arange(mask.shape[1], device=mask.device)
    return mask & (position == torch.where(mask, position, -1).amax(dim=-1, keepdim=True))


class RolloutBatch(TensorClass["nocast"]):  # type: ignore[type-arg]
    """What the rollout engine sampled."""

    uid: Int[Tensor, " B"]
    """Prompt group: rows that answer the same prompt share it."""
    prompt_ids: Int[Tensor, "B P"]
    prompt_length: Int[Tensor, " B"]
    response_ids: Int[Tensor, "B T"]
    response_length: Int[Tensor, " B"]
    response_mask: Bool[Tensor, "B T"]
    """True where the policy itself sampled the token."""
    rollout_log_probs: Float[Tensor, "B T"]
    """Log-probability under the distribution that the token was truly sampled from."""
    truncated: Bool[Tensor, " B"]
    """The response was cut by the length limit: it did not end by itself."""


class TrainBatch(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg]
    """A rollout with everything that the losses need; the optional fields are filled in along the step."""

    uid: Int[Tensor, " B"]
    prompt_ids: Int[Tensor, "B P"]
    prompt_length: Int[Tensor, " B"]
    response_ids: Int[Tensor, "B T"]
    response_length: Int[Tensor, " B"]
    response_mask: Bool[Tensor, "B T"]
    rollout_log_probs: Float[Tensor, "B T"]
    truncated: Bool[Tensor, " B"]
    token_level_scores: Float[Tensor, "B T"]
    """The reward as given: for text, the score at the last response token."""
    scored: Bool[Tensor, " B"]
    """False where the reward abstained or failed: the row is left out of every statistic and of the update."""
    old_log_probs: Float[Tensor, "B T"] | None = None
    """Under the policy at the start of the update (the proximal policy)."""
    ref_log_probs: Float[Tensor, "B T"] | None = None
    values: Float[Tensor, "B T"] | None = None  # type: ignore[assignment]
    """The critic's estimate before each response token."""
    token_level_rewards: Float[Tensor, "B T"] | None = None
    """Scores after the KL penalty, if there is one."""
    advantages: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    rollout_is_weights: Float[Tensor, "B T"] | None = None
    """Importance weights against the sampler, which multiply the policy loss of each token; None: all 1."""

    @classmethod
    def assemble(cls, rollout: RolloutBatch, scores: Float[Tensor, " B"]) -> TrainBatch:
        """Join a rollout and its rewards.

        Args:
            rollout: what was sampled.
            scores: [B] one score a response; NaN where the reward abstained or failed.

        The score lands on the last token that the policy sampled. A row without a score loses its whole
        ``response_mask``, so that no statistic and no loss sees it.
        """
        scored = ~torch.isnan(scores) & rollout.response_mask.any(dim=-1)
        at_last = last_valid(rollout.response_mask) & scored[:, None]
        return cls(
            uid=rollout.uid,
            prompt_ids=rollout.prompt_ids,
            prompt_length=rollout.prompt_length,
            response_ids=rollout.response_ids,
            response_length=rollout.response_length,
            response_mask=rollout.response_mask & scored[:, None],
            rollout_log_probs=rollout.rollout_log_probs,
            truncated=rollout.truncated,
            token_level_scores=torch.where(at_last, scores[:, None].nan_to_num(), 0.0).to(torch.float32),
            scored=scored,
            batch_size=rollout.batch_size,
        )
