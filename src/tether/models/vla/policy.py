"""A vision-language-action policy as what trains and what acts sees it: like `tether.models.control.network_policy`'s.

Its actions are numbers of bins, K * D a decision (`tether.envs.spaces.action_bins` makes environments take them), its
outputs the scores of all bins of all of them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.models.control.heads import CategoricalHead
from tether.models.control.memoryless_policy import MemorylessPolicy
from tether.models.control.observations import ObservationBatch
from tether.models.control.spec import Observations, device_of
from tether.models.vla.model import ValueHead, VlaModel
from tether.models.vla.published import PublishedModel
from tether.models.vla.spec import ACTION_BINS, VlaSpec
from tether.runtime.install import pip_install


class VlaPolicy(MemorylessPolicy):
    """Network and value head.

    Args:
        spec: the shape.
        seed: of the first weights; those of a published network are none before they are loaded.

    Raises:
        ValueError: the tokenizer of a published network cannot be loaded.
    """

    max_rows = 256

    def __init__(self, spec: VlaSpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        self.head = CategoricalHead((ACTION_BINS,) * spec.action_tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = VlaModel(spec) if spec.network is None else PublishedModel(spec, spec.network)
            self.critic = ValueHead(spec.hidden_dim, spec.value_width) if spec.value_width else None
            if spec.lora_rank:
                lora = _lora()
                self.model.requires_grad_(False)
                modules = "all-linear" if spec.target_modules == ("all-linear",) else spec.target_modules
                options = lora.LoraOptions(spec.lora_rank, spec.lora_alpha, modules)
                lora.add_lora(self.model.language, options)

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

    def load_plain(self, weights: dict[str, Tensor]) -> None:
        """Take over weights as `plain_state` gives them; LoRA adapters and what is not among them stay."""
        own = self.state_dict()
        for name, value in weights.items():
            under = under_adapter(name)
            own[under if under in own else name].copy_(value)

    def plain_state(self) -> dict[str, Tensor]:
        """The weights of a policy without LoRA that computes the same."""
        if not self.spec.lora_rank:
            return self.state_dict()
        prefix = "model.language."
        state = {name: value for name, value in self.state_dict().items() if not name.startswith(prefix)}
        return state | {prefix + name: value for name, value in _lora().merged_state_dict(self.model.language).items()}


def under_adapter(name: str) -> str:
    """The name of a plain weight where a LoRA adapter stands over its layer."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.base_layer.{kind}"


def _lora() -> ModuleType:
    try:
        return importlib.import_module("tether.models.language.lora")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank: adapters need the package {error.name}. Run: {pip_install('lora')}"
        ) from error
