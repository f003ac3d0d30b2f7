"""Behaviour cloning: a policy learns to take the actions of recorded episodes.

The loss is the mean negative log-probability per column of the recorded actions. For discrete actions and action tokens
this is the cross-entropy, for a Gaussian with fixed standard deviation half the squared error over the variance, up to
a constant (Pomerleau 1988). A flow-matching policy has its own loss; its measurements all use the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.learning.losses import per_column
from tether.keyed_random import generator, held_out_rows, permutation
from tether.observations import Observation
from tether.runtime.machine import deterministic_kernels


class Clonable(Protocol):
    """A policy that can compute the log-probs of recorded actions."""

    def inputs(self, obs: TensorDict) -> Any:
        """Return the inputs of the networks from observations."""
        ...

    def log_probs(self, obs: Any, actions: Tensor) -> Tensor:
        """Return differentiable log-probs [B, K * D] of actions [B, K * D], given the result of `inputs`."""
        ...


@runtime_checkable
class MatchesFlow(Protocol):
    """A policy that is trained by a flow-matching loss."""

    def imitation_losses(self, obs: Any, actions: Tensor, generator: torch.Generator) -> Tensor:
        """Return differentiable losses [B, K * D] of actions [B, K * D], with noise from the generator."""
        ...


@dataclass(frozen=True)
class CloningData:
    """S decisions to imitate, each a chunk of actions."""

    obs: TensorDict
    """[S, ...]: observations as the environment returns them."""
    actions: Tensor
    """[S, K * D]"""
    mask: Tensor
    """[S, K]: whether an action is before the end of the episode."""

    def __len__(self) -> int:
        return len(self.obs)

    def rows(self, which: Tensor | slice) -> CloningData:
        """Return some of the decisions."""
        return CloningData(self.obs[which], self.actions[which], self.mask[which])


@dataclass(frozen=True)
class CloningOptions:
    """Epochs, batch size and optimizer settings."""

    lr: float
    batch_size: int
    epochs: int
    patience: int
    """Epochs without a better held-out loss after which training stops."""
    weight_decay: float = 0.0
    grad_clip: float = 1.0


def windows(
    obs: Sequence[Observation],
    actions: Sequence[NDArray[np.generic]],
    chunk: int,
) -> CloningData:
    """Make a decision for each step of the episodes, with its action and the `chunk` - 1 that follow.

    Args:
        obs: observations [T, ...] of each episode.
        actions: actions [T, D] of each episode.
        chunk: K, actions per decision.
    """
    columns: list[Tensor] = []
    masks: list[Tensor] = []
    for episode in actions:
        steps = torch.arange(len(episode))[:, None] + torch.arange(chunk)
        inside = steps < len(episode)
        columns.append(torch.from_numpy(episode)[steps.clamp(max=len(episode) - 1)].flatten(1))
        masks.append(inside)
    stacked = {name: torch.from_numpy(np.concatenate([episode[name] for episode in obs])) for name in obs[0]}
    return CloningData(TensorDict(stacked, batch_size=[sum(map(len, masks))]), torch.cat(columns), torch.cat(masks))


def split_episodes(count: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of training and held-out episodes, at least one each, drawn by `seed`.

    Raises:
        ValueError: there are fewer than two episodes.
    """
    if count < 2:
        raise ValueError(f"{count} episode: none can be held out; give at least 2")
    selected = held_out_rows(count, held_out, seed)
    return sorted({*range(count)} - {*selected}), sorted(selected)


@dataclass
class Cloning:
    """Trains a policy on decisions and measures it on held-out ones."""

    policy: Clonable
    parameters: Sequence[nn.Parameter]
    """The parameters to train."""
    learned: CloningData
    held_out: CloningData
    options: CloningOptions
    seed: int
    """Seed of the order of the decisions."""

    def run(self) -> Iterator[dict[str, float]]:
        """Train, and yield metrics before the first epoch and after each; at the end, load the best weights."""
        optimizer = torch.optim.AdamW(self.parameters, lr=self.options.lr, weight_decay=self.options.weight_decay)
        best = self.measure(self.held_out)
        yield {"bc/held_out_loss": best}
        best_weights, since = self._weights(), 0
        for epoch in range(self.options.epochs):
            learned = self._epoch(optimizer, epoch)
            loss = self.measure(self.held_out)
            since += 1
            if loss < best:
                best, best_weights, since = loss, self._weights(), 0
            yield {"bc/loss": learned, "bc/held_out_loss": loss, "bc/best_held_out_loss": best}
            if since >= self.options.patience or not math.isfinite(learned):
                break
        for parameter, weight in zip(self.parameters, best_weights, strict=True):
            parameter.data.copy_(weight)

    @torch.no_grad()
    def measure(self, data: CloningData) -> float:
        """Return the loss of decisions, in nats per column, or for a flow the squared error per column."""
        size = self.options.batch_size
        batches = [data.rows(slice(start, start + size)) for start in range(0, len(data), size)]
        noise = generator(self.seed, 0, "held-out noise")
        sums = [self._losses(batch, noise) for batch in batches]
        return float(sum(total for total, _ in sums) / sum(count for _, count in sums))

    def _epoch(self, optimizer: torch.optim.Optimizer, epoch: int) -> float:
        losses, noise = [], generator(self.seed, epoch, "imitation noise")
        order = torch.from_numpy(permutation(len(self.learned), self.seed, epoch, "order"))
        for rows in order.split(self.options.batch_size):
            total, count = self._losses(self.learned.rows(rows), noise)
            optimizer.zero_grad()
            with deterministic_kernels():
                (total / count).backward()
            nn.utils.clip_grad_norm_(self.parameters, self.options.grad_clip)
            optimizer.step()
            losses.append(float(total.detach() / count))
        return sum(losses) / len(losses)

    def _losses(self, data: CloningData, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all valid columns, and their number."""
        obs = self.policy.inputs(data.obs)
        if isinstance(self.policy, MatchesFlow):
            columns = self.policy.imitation_losses(obs, data.actions, noise)
        else:
            columns = -self.policy.log_probs(obs, data.actions)
        mask = per_column(data.mask, columns.shape[1])
        return torch.where(mask, columns, 0.0).sum(), mask.sum()

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]
