"""A backbone without lerobot: a small network with the methods of
`tether.integrations.robots.flow.backbone.Backbone`.
"""

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.policies.spec import NUMBERS
from tether.integrations.robots.flow.backbone import TOKEN_MASK, TOKENS, Prefix
from tether.integrations.robots.flow.spec import FlowSpec

WIDTH = 6


class FakeBackbone(nn.Module):
    """Perceptrons over numbers and the prompt; a velocity depends on all of the state of the chain."""

    critic_width = expert_width = WIDTH

    def __init__(self, spec: FlowSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, WIDTH)
        self.numbers = nn.Linear(spec.state_dim, WIDTH)
        self.chain = nn.Linear(spec.latents + 1, spec.horizon * WIDTH)
        self.action_out = nn.Linear(WIDTH, spec.latent_dim)
        self._horizon = spec.horizon

    def prefix(self, obs: TensorDict) -> Prefix:
        words = (self.tokens(obs[TOKENS]) * obs[TOKEN_MASK][..., None]).sum(dim=-2)
        read = torch.tanh(self.numbers(obs[NUMBERS]) + words)
        return Prefix(read, read)

    def velocity(self, prefix: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.chain(torch.cat([x.flatten(1), t[:, None]], dim=1)).unflatten(1, (self._horizon, WIDTH))
        hidden = torch.tanh(mixed + prefix.saved[:, None])
        return self.action_out(hidden), hidden

    def matching_losses(self, obs: TensorDict, actions: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        share = t[:, None, None]
        found, _ = self.velocity(self.prefix(obs), (1 - share) * actions + share * noise, t)
        return (found - (noise - actions)).square()
