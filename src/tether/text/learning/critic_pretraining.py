"""Pretraining of a critic on the returns of stored rollouts, before the first step of a run.

Without it, the first steps of PPO learn from the advantages of a critic with a zero head or, with a warm-up, use entire
rollouts to train only the critic. Targets are the Monte Carlo returns of the stored rewards. The loss is not clipped,
because there is no old critic to stay close to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms import explained_variance
from tether.algorithms.advantages import discounted_returns
from tether.batch import TrainBatch, filled
from tether.text.learning.losses import ValueOutputs
from tether.text.learning.pretraining import held_out_prompts
from tether.text.learning.rollout_files import StoredResponse

EXPLAINED = "critic/vf_explained_var"


def split_by_prompt(
    responses: Sequence[StoredResponse], held_out: float, seed: int
) -> tuple[list[StoredResponse], list[StoredResponse]]:
    """Split responses by prompt into training and held-out responses, with at least one prompt on each side.

    Raises:
        ValueError: all responses are to the same prompt.
    """
    selected = held_out_prompts((tuple(response.prompt_ids) for response in responses), held_out, seed)
    learned = [response for response in responses if tuple(response.prompt_ids) not in selected]
    return learned, [response for response in responses if tuple(response.prompt_ids) in selected]


def value_batch(responses: Sequence[StoredResponse], gamma: float) -> TrainBatch:
    """Return a batch whose `returns` are the rewards from each token on, discounted by gamma per token."""

    def padded(rows: list[list[int]] | list[list[bool]] | list[list[float]]) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    mask = padded([response.response_mask for response in responses])
    rewards = padded([response.rewards for response in responses])
    zeros, rows = torch.zeros_like(rewards), len(responses)
    prompts: dict[tuple[int, ...], int] = {}
    return TrainBatch(
        uid=torch.tensor([prompts.setdefault(tuple(response.prompt_ids), len(prompts)) for response in responses]),
        prompt_ids=padded([response.prompt_ids for response in responses]),
        prompt_length=torch.tensor([len(response.prompt_ids) for response in responses]),
        response_ids=padded([response.response_ids for response in responses]),
        response_length=torch.tensor([len(response.response_ids) for response in responses]),
        response_mask=mask,
        rollout_log_probs=zeros,
        kept=None,
        truncated=torch.zeros(rows, dtype=torch.bool),
        token_level_scores=rewards,
        scored=mask.any(dim=-1),
        values=zeros,
        returns=discounted_returns(rewards, mask, gamma),
        batch_size=[rows],
    )


def explained(outputs: ValueOutputs, batch: TrainBatch) -> dict[str, float]:
    """Return the share of the returns' variance that the values explain, as a metric."""
    return {EXPLAINED: float(explained_variance(outputs.values, filled(batch.returns), batch.response_mask))}
