"""A vision-language-action policy as what trains and what acts sees it: like `tether.models.control.network_policy`'s.

Its actions are numbers of bins, K * D a decision (`tether.envs.spaces.action_bins` makes environments take them), its
outputs the scores of all bins of all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn

from tether.models.control.actors import as_tensors
from tether.models.control.heads import CategoricalHead
from tether.models.control.micro_batches import backward_in_micro_batches, forward_in_micro_batches
from tether.models.control.observations import ObservationBatch
from tether.models.control.spec import ForwardPass, Memory, Observations, RolloutEvaluation, device_of
from tether.models.vla.model import ValueHead, VlaModel
from tether.models.vla.spec import ACTION_BINS, VlaSpec
from tether.observations import Observation

ROWS = 256
"""Decisions of a pass without gradients, at most."""


class VlaPolicy(nn.Module):
    """Encoder, transformer and value head.

    Args:
        spec: the shape.
        seed: of the first weights.
    """

    state_width = 0
    """There is no memory."""
    normalizer = None

    def __init__(self, spec: VlaSpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        self.head = CategoricalHead((ACTION_BINS,) * spec.action_tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = VlaModel(spec)
            self.critic = ValueHead(spec.hidden_dim, spec.value_width) if spec.value_width else None
            if spec.lora_rank:
                lora = _lora()
                self.model.requires_grad_(False)
                modules = "all-linear" if spec.target_modules == ("all-linear",) else spec.target_modules
                options = lora.LoraOptions(spec.lora_rank, spec.lora_alpha, modules)
                lora.add_lora(self.model.language, options)
        self.micro_batch: int | None = None
        """Decisions of a forward and backward pass; None: all at once."""

    @property
    def _rows(self) -> int:
        return min(ROWS, self.micro_batch or ROWS)

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The trained parameters: of the policy, and of the value head."""
        critic = [] if self.critic is None else list(self.critic.parameters())
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad], critic

    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """The inputs of the networks from observations [..., *shape]."""
        return self.model.inputs(obs)

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Nothing is normalised, so there are no statistics."""

    def forward(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, A * bins] and values [B, V] for observations [B, ...] and the actions [B, A] that were taken."""
        scores, hidden = self.model(self.model.prompt(obs), actions)
        return scores.flatten(1), None if self.critic is None else self.critic(hidden)

    def decide(self, obs: Observations, memory: Memory | None, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs and values, as `forward`; there is no memory."""
        return self(obs, actions)

    def log_probs(self, obs: Observations, actions: Tensor) -> Tensor:
        """Log-probabilities [B, A] of actions [B, A], differentiable."""
        return self.head.evaluate(self(obs, actions)[0], actions).log_probs

    @torch.no_grad()
    def values(self, obs: Observations) -> Tensor:
        """Values [B, V] of observations [B, ...]."""
        assert self.critic is not None
        if not len(obs):  # transformers cannot tell the shapes of nothing
            return torch.zeros(0, self.spec.value_width, device=device_of(self))
        pieces = [self.critic(self.model.end_of_prompt(self.model.prompt(piece))) for piece in obs.split(self._rows)]
        return torch.cat(pieces)

    @torch.no_grad()
    def act(self, obs: Observations, noise: Tensor | None) -> Tensor:
        """Choose actions [N, A]; `noise` [N, A * bins] of the head, None takes the likeliest."""
        shaped = None if noise is None else noise.unflatten(1, (self.spec.action_tokens, -1))
        return self.model.choose(self.model.prompt(obs), shaped)

    def acting(self) -> VlaActor:
        """An actor with the current weights."""
        return VlaActor(self)

    @torch.no_grad()
    def outputs(self, obs: Observations, memory: Memory | None, actions: Tensor) -> Tensor:
        """Outputs [B, A * bins]."""
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
        outputs = torch.cat([scores for scores, _ in results]).unflatten(0, shape)
        if self.critic is None:
            return RolloutEvaluation(outputs, None, None)
        values = torch.cat([piece for _, piece in results if piece is not None]).unflatten(0, shape)
        values = torch.cat([values, self.values(obs[:, -1])[:, None]], dim=1)
        return RolloutEvaluation(outputs, values, self.values(final_obs))

    def run(self, obs: Observations, memory: Memory | None, actions: Tensor) -> ForwardPass:
        """Say something of B decisions, for `backward`; see
        `tether.models.control.network_policy.NetworkPolicy.run`.
        """
        return forward_in_micro_batches(self, self._pieces(obs, actions))

    def backward(self, passed: ForwardPass, outputs_grad: Tensor | None, values_grad: Tensor | None) -> None:
        """Write the gradient of every trained parameter into its existing ``grad``.

        Args:
            passed: what `run` gave.
            outputs_grad: of the loss by the outputs, [B, A * bins]; None: there is none.
            values_grad: by the values, [B, V].
        """
        for group in self.parameter_groups():
            for parameter in group:
                assert parameter.grad is not None
                parameter.grad.zero_()
        backward_in_micro_batches(self, passed, outputs_grad, values_grad)

    def load_plain(self, weights: dict[str, Tensor]) -> None:
        """Take over weights as `plain_state` gives them; LoRA adapters and what is not among them stay."""
        own = self.state_dict()
        for name, value in weights.items():
            stem, _, kind = name.rpartition(".")
            adapted = f"{stem}.base_layer.{kind}"
            own[adapted if adapted in own else name].copy_(value)

    def plain_state(self) -> dict[str, Tensor]:
        """The weights of a policy without LoRA that computes the same."""
        if not self.spec.lora_rank:
            return self.state_dict()
        prefix = "model.language."
        state = {name: value for name, value in self.state_dict().items() if not name.startswith(prefix)}
        return state | {prefix + name: value for name, value in _lora().merged_state_dict(self.model.language).items()}

    def _pieces(self, obs: Observations, actions: Tensor) -> Iterator[tuple[Observations, Tensor]]:
        size = self.micro_batch or len(actions)
        yield from zip(obs.split(size), actions.split(size), strict=True)


def _lora() -> ModuleType:
    try:
        return importlib.import_module("tether.models.language.lora")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank: adapters need the package {error.name}. "
            "Run: pip install 'tether[lora]'"
        ) from error


class VlaActor:
    """The `tether.models.control.actors.Act` of a vision-language-action policy.

    Args:
        policy: on any device.
    """

    def __init__(self, policy: VlaPolicy) -> None:
        self._policy, self._device = policy, device_of(policy)

    def __call__(
        self, obs: Observation, noise: NDArray[np.float32] | None, state: NDArray[np.float32]
    ) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
        """See there."""
        drawn = None if noise is None else torch.from_numpy(noise).to(self._device)
        chosen = self._policy.act(self._policy.inputs(as_tensors(obs, self._device)), drawn)
        return chosen.cpu().numpy(), state
