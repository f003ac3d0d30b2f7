"""A critic that already knows the returns of stored rollouts before the first step of a run.

Without it the first steps of PPO learn from advantages that a critic with a zero head makes, or, with a warm-up, spend
whole rollouts on the critic alone. Targets are the Monte Carlo returns of the stored rewards, and the loss is not
clipped: there is no old critic to stay near.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms import explained_variance
from tether.algorithms.advantages import discounted_returns
from tether.batch import TrainBatch, filled
from tether.keyed_random import permutation
from tether.trainer.text.rollout_files import StoredResponse
from tether.training import Learner, UpdatePlan
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
    prompts = list(dict.fromkeys(tuple(response.prompt_ids) for response in responses))
    if len(prompts) < 2:
        raise ValueError("the stored rollouts are all to one prompt, so none can be held out; give more of them")
    count = min(max(round(held_out * len(prompts)), 1), len(prompts) - 1)
    chosen = {prompts[number] for number in permutation(len(prompts), seed, 0, "held out")[:count]}
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


@dataclass(frozen=True)
class CriticPretraining:
    """A critic, what it learns from, and what it is measured on."""

    learner: Learner[TrainBatch, ValueOutputs]
    learned: TrainBatch
    held_out: TrainBatch
    plan: UpdatePlan
    """Epochs and mini-batches over all of `learned`."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return sum(1 for epoch in range(self.plan.epochs) for _ in self._mini_batches(epoch))

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Train; yields (optimizer step, metrics) after each step, and step 0 before the first.

        ``critic/vf_explained_var`` is of the held-out responses: before the first step and after each epoch.
        """
        yield 0, self._explained()
        step = 0
        for epoch in range(self.plan.epochs):
            mini_batches = list(self._mini_batches(epoch))
            for rows in mini_batches:
                once = UpdatePlan(mini_batch_rows=len(rows))
                updated = self.learner.engine.update(self.learned[rows], self.learner.loss, once, step)
                step += 1
                metrics = {name if "/" in name else f"critic/{name}": value for name, value in updated.metrics.items()}
                yield step, metrics | (self._explained() if rows is mini_batches[-1] else {})

    def _mini_batches(self, epoch: int) -> Iterator[Tensor]:
        return replace(self.plan, shuffle=True).mini_batches(len(self.learned), 0, epoch)

    def _explained(self) -> dict[str, float]:
        values, batch = self.learner.infer(self.held_out).values, self.held_out
        return {EXPLAINED: float(explained_variance(values, filled(batch.returns), batch.response_mask))}
