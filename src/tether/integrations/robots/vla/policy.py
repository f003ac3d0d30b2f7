"""A vision-language-action policy with the interface of `tether.control.policies.network_policy`.

Its actions are bin indices, K * D per decision (`tether.integrations.robots.action_bins` converts environments to
them); its outputs are the scores of all bins for all actions.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.policies.memoryless_policy import MemorylessPolicy
from tether.control.policies.networks import CategoricalHead, device_of
from tether.control.policies.spec import ObservationBatch, Observations
from tether.integrations.robots.action_bins import ActionBins
from tether.integrations.robots.vla.model import ValueHead, VlaModel
from tether.integrations.robots.vla.published import PublishedModel
from tether.integrations.robots.vla.spec import ACTION_BINS, VlaSpec
from tether.runtime.install import pip_install

FROM_START = ("low", "high")
OF_NETWORK = ("network", "hidden_dim", "num_layers", "num_heads")
"""Fields of the spec that a run copies from its initial policy; `OF_NETWORK` only for a published network."""


class VlaPolicy(MemorylessPolicy):
    """A vision-language-action network with a value head.

    Args:
        spec: the spec of the policy.
        seed: seed of the initialisation; a published network is loaded instead.

    Raises:
        ValueError: the tokenizer of a published network cannot be loaded.
    """

    max_rows = 256
    set_by_run = ("dtype", "value_width", "low", "high", "lora_rank", "lora_alpha", "target_modules")

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
                modules = lora.names_or_pattern(spec.target_modules)
                options = lora.LoraOptions(spec.lora_rank, spec.lora_alpha, modules)
                lora.add_lora(self.model.language, options)

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trained parameters of the policy and of the value head."""
        critic = [] if self.critic is None else list(self.critic.parameters())
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad], critic

    def narrow_parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters()) if self.spec.dtype == "bfloat16" else []

    def inputs(self, obs: ObservationBatch) -> TensorDict:
        return self.model.inputs(obs)

    def update_statistics(self, obs: ObservationBatch) -> None:
        """Do nothing: observations are not normalised, so there are no statistics."""

    def forward(self, obs: Observations, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        scores, hidden = self.model(self.model.prompt(obs), actions)
        return scores.flatten(1), None if self.critic is None else self.critic(hidden)

    @torch.no_grad()
    def values(self, obs: Observations) -> Tensor:
        assert self.critic is not None
        if not len(obs):  # transformers cannot tell the shapes of nothing
            return torch.zeros(0, self.spec.value_width, device=device_of(self))
        values = [self.critic(self.model.end_of_prompt(self.model.prompt(chunk))) for chunk in obs.split(self._rows)]
        return torch.cat(values)

    @torch.no_grad()
    def act(self, obs: Observations, noise: Tensor | None) -> Tensor:
        shaped = None if noise is None else noise.unflatten(1, (self.spec.action_tokens, -1))
        return self.model.choose(self.model.prompt(obs), shaped)

    def action_code(self) -> ActionBins:
        return ActionBins(self.spec.low, self.spec.high)

    def inherited_fields(self) -> dict[str, object]:
        names = FROM_START if self.spec.network is None else FROM_START + OF_NETWORK
        return {name: getattr(self.spec, name) for name in names}

    def load_plain(self, weights: dict[str, Tensor]) -> None:
        """Load weights in the format of `plain_state`; LoRA adapters and missing weights stay unchanged."""
        state = self.state_dict()
        for name, value in weights.items():
            wrapped = under_adapter(name)
            state[wrapped if wrapped in state else name].copy_(value)

    def plain_state(self) -> dict[str, Tensor]:
        """Return the weights with merged LoRA adapters."""
        if not self.spec.lora_rank:
            return self.state_dict()
        prefix = "model.language."
        state = {name: value for name, value in self.state_dict().items() if not name.startswith(prefix)}
        return state | {prefix + name: value for name, value in _lora().merged_state_dict(self.model.language).items()}


def under_adapter(name: str) -> str:
    """Return the name of a plain weight inside the layer that a LoRA adapter wraps."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}.base_layer.{kind}"


def _lora() -> ModuleType:
    try:
        return importlib.import_module("tether.text.models.lora")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank: adapters need the package {error.name}. Run: {pip_install('lora')}"
        ) from error
