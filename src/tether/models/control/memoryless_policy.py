"""Shared by policies without a memory whose outputs depend on the actions that were taken: like
`tether.models.control.network_policy`'s, with large networks, so that passes without gradients go in pieces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn

from tether.models.control.actors import as_tensors
from tether.models.control.micro_batches import backward_in_micro_batches, forward_in_micro_batches
from tether.models.control.observations import ObservationBatch
from tether.models.control.spec import ForwardPass, Memory, Observations, RolloutEvaluation, device_of
from tether.observations import Observation


class MemorylessPolicy(nn.Module):
    """A policy whose decisions are passes of their own; actions [B, A] are those that it records.

    A subclass sets `head`, and `critic` where it has one.
    """

    max_rows: ClassVar[int]
    """Decisions of a pass without gradients, at most."""
    state_width = 0
    """There is no memory."""
    normalizer = None
    head: Any

    def __init__(self) -> None:
        super().__init__()
        self.micro_batch: int | None = None
        """Decisions of a forward and backward pass; None: all at once."""

    @abstractmethod
    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The trained parameters: of the policy, and of the value head."""

    @abstractmethod
    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """The inputs of the networks from observations [..., *shape]."""

    @abstractmethod
    def forward(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, outputs] and values [B, V] for observations [B, ...] and the actions [B, A] that were taken."""

    @abstractmethod
    def values(self, obs: Observations) -> Tensor:
        """Values [B, V] of observations [B, ...]."""

    @abstractmethod
    def act(self, obs: Observations, noise: Tensor | None) -> Tensor:
        """Choose actions [N, A]; `noise` [N, ...] of the head, None takes the likeliest."""

    @property
    def _rows(self) -> int:
        return min(self.max_rows, self.micro_batch or self.max_rows)

    def decide(self, obs: Observations, memory: Memory | None, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs and values, as `forward`; there is no memory."""
        outputs, values = self(obs, actions)
        return outputs, values

    def log_probs(self, obs: Observations, actions: Tensor) -> Tensor:
        """Log-probabilities of actions [B, A], differentiable."""
        log_probs: Tensor = self.head.evaluate(self(obs, actions)[0], actions).log_probs
        return log_probs

    def acting(self) -> PolicyActor:
        """An actor with the current weights."""
        return PolicyActor(self)

    @torch.no_grad()
    def outputs(self, obs: Observations, memory: Memory | None, actions: Tensor) -> Tensor:
        """Outputs [B, outputs]."""
        pieces = zip(obs.split(self._rows), actions.split(self._rows), strict=True)
        return torch.cat([self(*piece)[0] for piece in pieces])

    @torch.no_grad()
    def review(
        self,
        obs: Observations,
        starts: Tensor,
        state: Tensor,
        final_obs: Observations,
        final_at: tuple[Tensor, Tensor],
        actions: Tensor,
    ) -> RolloutEvaluation:
        """Pass over a rollout: observations [M, C + 1, ...] and [F, ...], actions [M, C, A]."""
        shape = actions.shape[:2]
        pieces = zip(obs[:, :-1].flatten(0, 1).split(self._rows), actions.flatten(0, 1).split(self._rows), strict=True)
        results = [self(*piece) for piece in pieces]
        outputs = torch.cat([part for part, _ in results]).unflatten(0, shape)
        found = [part for _, part in results if part is not None]
        if not found:
            return RolloutEvaluation(outputs, None, None)
        values = torch.cat([torch.cat(found).unflatten(0, shape), self.values(obs[:, -1])[:, None]], dim=1)
        return RolloutEvaluation(outputs, values, self.values(final_obs))

    def run(self, obs: Observations, memory: Memory | None, actions: Tensor) -> ForwardPass:
        """See `tether.models.control.network_policy.NetworkPolicy.run`."""
        return forward_in_micro_batches(self, self._pieces(obs, actions))

    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every trained parameter into its existing ``grad``.

        Args:
            passed: what `run` gave.
            outputs_grad: of the loss by the outputs, [B, outputs]; None: there is none.
            values_grad: by the values, [B, V].
        """
        for group in self.parameter_groups():
            for parameter in group:
                assert parameter.grad is not None
                parameter.grad.zero_()
        backward_in_micro_batches(self, passed, outputs_grad, values_grad)

    def _pieces(self, obs: Observations, actions: Tensor) -> Iterator[tuple[Observations, Tensor]]:
        size = self.micro_batch or len(actions)
        yield from zip(obs.split(size), actions.split(size), strict=True)


class PolicyActor:
    """The `tether.models.control.actors.Act` of such a policy.

    Args:
        policy: on any device.
    """

    def __init__(self, policy: MemorylessPolicy) -> None:
        self._policy, self._device = policy, device_of(policy)

    def __call__(
        self, obs: Observation, noise: NDArray[np.float32] | None, state: NDArray[np.float32]
    ) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
        """See there."""
        drawn = None if noise is None else torch.from_numpy(noise).to(self._device)
        chosen = self._policy.act(self._policy.inputs(as_tensors(obs, self._device)), drawn)
        return chosen.cpu().numpy(), state
