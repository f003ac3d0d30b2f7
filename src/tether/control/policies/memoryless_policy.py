"""Base class of policies without recurrent state whose outputs depend on the recorded actions.

It has the interface of `tether.control.policies.network_policy`. It is for large networks: passes without gradients are
split into micro-batches, too.
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

from tether.control.envs.layers import ActionCode
from tether.control.policies.micro_batches import backward_in_micro_batches, forward_in_micro_batches
from tether.control.policies.networks import as_tensors, device_of
from tether.control.policies.spec import ForwardPass, Memory, ObservationBatch, Observations, RolloutEvaluation
from tether.observations import Observation
from tether.types import JsonObject


class MemorylessPolicy(nn.Module):
    """A policy that computes each decision independently; actions [B, A] are in the form in which it records them.

    A subclass sets `head`, and `critic` if it has one.
    """

    max_rows: ClassVar[int]
    """Maximum number of decisions in a pass without gradients."""
    state_width = 0
    """There is no recurrent state."""
    normalizer = None
    spaces: JsonObject | None = None
    """Spaces of the environment (`tether.control.envs.spaces`); None: unknown."""
    spec: Any
    """Spec of the policy, a dataclass."""
    head: Any
    set_by_run: ClassVar[tuple[str, ...]] = ()
    """Fields of the spec that a run may set differently from its initial policy."""

    def __init__(self) -> None:
        super().__init__()
        self.micro_batch: int | None = None
        """Number of decisions in a forward and backward pass; None: all at once."""

    @abstractmethod
    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trained parameters of the policy, and of the value head."""

    def narrow_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that compute in bfloat16, while the optimizer updates float32 copies of them."""
        return []

    @abstractmethod
    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """Return the inputs of the networks for observations [..., *shape]."""

    @abstractmethod
    def update_statistics(self, obs: ObservationBatch) -> None:
        """Update the statistics of observations, if the policy has any."""

    @abstractmethod
    def forward(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, outputs] and values [B, V] for observations [B, ...] and recorded actions [B, A]."""

    @abstractmethod
    def values(self, obs: Observations) -> Tensor:
        """Return values [B, V] of observations [B, ...]."""

    @abstractmethod
    def act(self, obs: Observations, noise: Tensor | None) -> Tensor:
        """Choose actions [N, A] with the head's `noise` [N, ...]; None chooses the most likely ones."""

    @abstractmethod
    def action_code(self) -> ActionCode:
        """Return how the policy encodes the actions of its environments."""

    @abstractmethod
    def inherited_fields(self) -> dict[str, object]:
        """Return the fields of the spec that a run copies from its initial policy."""

    @abstractmethod
    def plain_state(self) -> dict[str, Tensor]:
        """Return the weights with merged adapters."""

    @abstractmethod
    def load_plain(self, weights: dict[str, Tensor]) -> None:
        """Load weights in the format of `plain_state`; missing ones stay unchanged."""

    @property
    def _rows(self) -> int:
        return min(self.max_rows, self.micro_batch or self.max_rows)

    def decide(self, obs: Observations, memory: Memory | None, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs and values, as `forward` does; there is no recurrent state."""
        outputs, values = self(obs, actions)
        return outputs, values

    def log_probs(self, obs: Observations, actions: Tensor) -> Tensor:
        """Return differentiable log-probabilities of actions [B, A]."""
        log_probs: Tensor = self.head.evaluate(self(obs, actions)[0], actions).log_probs
        return log_probs

    def acting(self) -> PolicyActor:
        """Return an actor with the current weights."""
        return PolicyActor(self)

    @torch.no_grad()
    def outputs(self, obs: Observations, memory: Memory | None, actions: Tensor) -> Tensor:
        """Return outputs [B, outputs]."""
        batches = zip(obs.split(self._rows), actions.split(self._rows), strict=True)
        return torch.cat([self(*batch)[0] for batch in batches])

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
        """Evaluate a rollout: observations [M, C + 1, ...] and [F, ...], actions [M, C, A]."""
        shape = actions.shape[:2]
        batches = zip(obs[:, :-1].flatten(0, 1).split(self._rows), actions.flatten(0, 1).split(self._rows), strict=True)
        results = [self(*batch) for batch in batches]
        outputs = torch.cat([output for output, _ in results]).unflatten(0, shape)
        batch_values = [value for _, value in results if value is not None]
        if not batch_values:
            return RolloutEvaluation(outputs, None, None)
        values = torch.cat([torch.cat(batch_values).unflatten(0, shape), self.values(obs[:, -1])[:, None]], dim=1)
        return RolloutEvaluation(outputs, values, self.values(final_obs))

    def run(self, obs: Observations, memory: Memory | None, actions: Tensor) -> ForwardPass:
        """Run a differentiable forward pass, as `tether.control.policies.network_policy.NetworkPolicy.run` does."""
        return forward_in_micro_batches(self, self._micro_batches(obs, actions))

    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every trained parameter into its existing ``grad``, or pass it to its hook.

        Args:
            passed: result of `run`.
            outputs_grad: gradient of the loss with respect to the outputs, [B, outputs]; None: no gradient.
            values_grad: gradient with respect to the values, [B, V].
        """
        for group in self.parameter_groups():
            for parameter in group:
                if parameter.grad is not None:  # parameters of a narrower format have none
                    parameter.grad.zero_()
        backward_in_micro_batches(self, passed, outputs_grad, values_grad)

    def _micro_batches(self, obs: Observations, actions: Tensor) -> Iterator[tuple[Observations, Tensor]]:
        size = self.micro_batch or len(actions)
        yield from zip(obs.split(size), actions.split(size), strict=True)


class PolicyActor:
    """The `tether.control.policies.networks.Act` of a `MemorylessPolicy`."""

    def __init__(self, policy: MemorylessPolicy) -> None:
        self._policy, self._device = policy, device_of(policy)

    def __call__(
        self, obs: Observation, noise: NDArray[np.float32] | None, state: NDArray[np.float32]
    ) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
        """Choose actions, as `tether.control.policies.networks.Act` describes."""
        drawn = None if noise is None else torch.from_numpy(noise).to(self._device)
        chosen = self._policy.act(self._policy.inputs(as_tensors(obs, self._device)), drawn)
        return chosen.cpu().numpy(), state
