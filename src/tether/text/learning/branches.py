"""Adds the further branches of episodes to a batch as rows, so that each token that an episode sampled is trained on
once.

A batch begins with one row per episode, for its main branch. The rows of further branches follow, with the score of
their episode. If several branches share a token, it is in the `response_mask` of one of them only::

    row      response_mask                   episode   score
    0        [sampled][reply][sampled]       0         0.5
    1        [sampled]                       1         1
    2        [.......][other][sampled]       0         0.5       branches off row 0 after its first turn

Comparisons of scores count an episode once (`TrainBatch.episodes`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tether.algorithms import Advantages
from tether.batch import TrainBatch
from tether.text.learning.collector import ScoredResponses
from tether.text.sampling.concat import join_rollouts


def with_branches(batch: TrainBatch, responses: ScoredResponses) -> TrainBatch:
    """Return a batch with the rows of further branches, of which there must be at least one, appended to its own.

    Args:
        batch: a row for each response, with its score and the inputs of estimators.
        responses: the responses.
    """
    count, further = len(batch), responses.branches
    episode = torch.tensor([*range(count), *(row for row, rollout in further.items() for _ in range(len(rollout)))])
    rollout = join_rollouts([responses.rollout, *further.values()], [0] * (1 + len(further)))
    beyond = torch.arange(rollout.prompt_ids.shape[1]) >= rollout.prompt_length[:, None]
    has_prompt = ((rollout.prompt_ids == rollout.prompt_ids[episode]) | beyond).all(dim=-1)
    has_prompt &= rollout.prompt_length == rollout.prompt_length[episode]
    # A branch with a different prompt gets its own group, since all rows of a group share their prompt.
    alone = int(batch.uid.max()) + 1 + torch.arange(len(episode))
    rollout.uid = torch.where(has_prompt, batch.uid[episode], alone)
    scores = torch.where(batch.scored, responses.scores, torch.nan)
    joined = TrainBatch.assemble(rollout, scores[episode])
    joined.episode = episode
    if batch.reward_baselines is not None:
        joined.reward_baselines = batch.reward_baselines[episode]
    if batch.reward_components is not None:
        joined.reward_components = batch.reward_components[episode]
    if batch.teacher is not None:
        joined.teacher = batch.teacher[episode]
    return joined


def estimate_by_branch(estimate: Callable[[TrainBatch], Advantages], batch: TrainBatch) -> Advantages:
    """Estimate advantages with an estimator that compares rows, so that each comparison has one row per episode.

    The first call has the main branch of each episode. In further calls an episode is represented by its second, third,
    ... branch, which has the same score.

    Args:
        estimate: returns the advantages of a batch in which every row is an episode.
        batch: a batch with further branches.
    """
    assert batch.episode is not None
    main, shape = batch.episodes(), batch.response_mask.shape
    first = estimate(main)
    advantages, returns = first.advantages.new_zeros(shape), first.returns.new_zeros(shape)
    advantages[: len(main)], returns[: len(main)] = first.advantages, first.returns
    # Branches without tokens to train on are skipped: they would remove their episode from the comparison.
    left = [row for row in range(len(main), len(batch)) if batch.response_mask[row].any()]
    while left:
        row_of = {int(batch.episode[row]): row for row in reversed(left)}  # the first row of each episode
        episodes, rows = torch.tensor([*row_of]), torch.tensor([*row_of.values()])
        standing = torch.arange(len(main))
        standing[episodes] = rows
        compared = batch[standing]
        compared.uid = main.uid
        result = estimate(compared)
        advantages[rows], returns[rows] = result.advantages[episodes], result.returns[episodes]
        left = [row for row in left if row not in row_of.values()]
    return Advantages(advantages, returns)
