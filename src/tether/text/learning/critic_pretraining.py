"""Pretraining of a critic on the returns of stored rollouts, before the first step of a run.

Without it, the first steps of PPO use advantages of a critic with a zero head or, with a warm-up, spend entire rollouts
on training only the critic. Targets are the Monte Carlo returns of the stored rewards. The loss is not clipped, because
there is no old critic to stay close to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms import explained_variance
from tether.algorithms.advantages import discounted_returns
from tether.batch import TrainBatch, filled
from tether.text.learning.losses import ValueOutputs
from tether.text.learning.pretraining import held_out_prompts
from tether.text.learning.rollout_files import StoredResponse
from tether.text.learning.scoring import marked_rows

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
    """Return a batch whose `returns` at each token are the sum of the rewards from there on, discounted by gamma per
    token."""
    prompts: dict[tuple[int, ...], int] = {}
    batch = marked_rows(
        [prompts.setdefault(tuple(response.prompt_ids), len(prompts)) for response in responses],
        [response.prompt_ids for response in responses],
        [response.response_ids for response in responses],
        [[column for column, valid in enumerate(response.response_mask) if valid] for response in responses],
    )
    rewards = pad_sequence([torch.tensor(response.rewards) for response in responses], batch_first=True)
    batch.token_level_scores, batch.values = rewards, torch.zeros_like(rewards)
    batch.returns = discounted_returns(rewards, batch.response_mask, gamma)
    return batch


def explained_variance_metrics(outputs: ValueOutputs, batch: TrainBatch) -> dict[str, float]:
    """Return the explained variance: the share of the returns' variance that the values explain, as a metric."""
    return {EXPLAINED: float(explained_variance(outputs.values, filled(batch.returns), batch.response_mask))}
