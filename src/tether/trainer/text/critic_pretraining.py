"""A critic that already knows the returns of stored rollouts before the first step of a run.

Without it the first steps of PPO learn from advantages that a critic with a zero head makes, or, with a warm-up, spend
whole rollouts on the critic alone. Targets are the Monte Carlo returns of the stored rewards, and the loss is not
clipped: there is no old critic to stay near.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms import explained_variance
from tether.algorithms.advantages import discounted_returns
from tether.batch import TrainBatch, filled
from tether.trainer.text.pretraining import held_out_prompts
from tether.trainer.text.rollout_files import StoredResponse
from tether.training.text import ValueOutputs

EXPLAINED = "critic/vf_explained_var"


def split_by_prompt(
    responses: Sequence[StoredResponse], held_out: float, seed: int
) -> tuple[list[StoredResponse], list[StoredResponse]]:
    """Part the prompts, at least one on each side: all responses to a prompt are learned from, or none is.

    Args:
        responses: of at least two prompts.
        held_out: share of the prompts that is kept apart.
        seed: of the pick.

    Raises:
        ValueError: all responses are to the same prompt.
    """
    chosen = held_out_prompts((tuple(response.prompt_ids) for response in responses), held_out, seed)
    learned = [response for response in responses if tuple(response.prompt_ids) not in chosen]
    return learned, [response for response in responses if tuple(response.prompt_ids) in chosen]


def value_batch(responses: Sequence[StoredResponse], gamma: float) -> TrainBatch:
    """A batch with `returns`: the rewards from each token on, discounted by gamma a token."""

    def padded(rows: list[list[int]] | list[list[bool]] | list[list[float]]) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    mask = padded([response.response_mask for response in responses])
    rewards = padded([response.rewards for response in responses])
    nothing, rows = torch.zeros_like(rewards), len(responses)
    prompts: dict[tuple[int, ...], int] = {}
    return TrainBatch(
        uid=torch.tensor([prompts.setdefault(tuple(response.prompt_ids), len(prompts)) for response in responses]),
        prompt_ids=padded([response.prompt_ids for response in responses]),
        prompt_length=torch.tensor([len(response.prompt_ids) for response in responses]),
        response_ids=padded([response.response_ids for response in responses]),
        response_length=torch.tensor([len(response.response_ids) for response in responses]),
        response_mask=mask,
        rollout_log_probs=nothing,
        kept=None,
        truncated=torch.zeros(rows, dtype=torch.bool),
        token_level_scores=rewards,
        scored=mask.any(dim=-1),
        values=nothing,
        returns=discounted_returns(rewards, mask, gamma),
        batch_size=[rows],
    )


def explained(outputs: ValueOutputs, batch: TrainBatch) -> dict[str, float]:
    """The share of the returns' variance that the values explain."""
    return {EXPLAINED: float(explained_variance(outputs.values, filled(batch.returns), batch.response_mask))}
