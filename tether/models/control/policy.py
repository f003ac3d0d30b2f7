"""A control policy: an actor, a critic and the statistics of what they see."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tether.models.control.acting import Actor
from tether.models.control.heads import CategoricalHead, GaussianHead
from tether.models.control.mlp import Mlp
from tether.models.control.normalize import RunningNormalizer

SPEC_FILE, WEIGHTS_FILE = "policy.json", "policy.safetensors"


@dataclass(frozen=True)
class PolicySpec:
    """The shape of a policy: enough to build it again."""

    obs_dim: int
    choices: tuple[int, ...] | None
    """Alternatives of each column of an action; None: actions are numbers."""
    action_width: int
    """D: columns of an action."""
    num_action_chunks: int = 1
    """K: actions that are decided on at once; the head has K * D columns, those of an action side by side."""
    value_width: int = 1
    """Values of an observation: 1, or K, one before each action of the chunk; 0: there is no critic."""
    share_critic: bool = False
    """The critic is a linear layer on the actor's last hidden layer, not a network of its own."""
    hidden_dim: int = 256
    num_layers: int = 3
    activation: str = "tanh"
    init_logstd: float = -0.5
    normalize_observations: bool = False
    clip_observations: float = 10.0


class ControlPolicy(nn.Module):
    """Actor and critic over one normalised observation.

    Args:
        spec: the shape.
        seed: of the first weights.
    """

    def __init__(self, spec: PolicySpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        hidden = [spec.obs_dim] + [spec.hidden_dim] * spec.num_layers
        self.head = (
            GaussianHead(spec.action_width * spec.num_action_chunks, spec.init_logstd)
            if spec.choices is None
            else CategoricalHead(spec.choices * spec.num_action_chunks)
        )
        self.actor = Mlp([*hidden, self.head.outputs], spec.activation, 0.01 * math.sqrt(2), generator)
        self.critic: Mlp | None = None
        if spec.value_width:
            before = hidden[-1:] if spec.share_critic else hidden
            self.critic = Mlp([*before, spec.value_width], spec.activation, 1.0, generator)
        self.normalizer: RunningNormalizer | None = None
        if spec.normalize_observations:
            self.normalizer = RunningNormalizer(spec.obs_dim, spec.clip_observations)

    def normalized(self, obs: Tensor) -> Tensor:
        """What the networks see of raw observations [..., obs_dim]."""
        return obs if self.normalizer is None else self.normalizer(obs)

    def log_probs(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Log-probabilities [B, K * D] of actions [B, K * D], given normalised observations [B, obs_dim]."""
        return self.head.evaluate(self.actor(obs), actions).log_probs

    def acting(self) -> Actor:
        """What acts with the weights of this moment."""
        return Actor(self)

    @torch.no_grad()
    def values(self, obs: Tensor) -> Tensor:
        """Values [B, value_width] of normalised observations [B, obs_dim]."""
        assert self.critic is not None
        return self.critic(self.actor.activations(obs)[-2] if self.spec.share_critic else obs)


def save_policy(policy: ControlPolicy, folder: Path) -> None:
    """Write the spec as JSON and the weights, statistics among them, as safetensors."""
    folder.mkdir()
    (folder / SPEC_FILE).write_text(json.dumps(asdict(policy.spec), indent=2))
    save_file({name: value.detach().clone() for name, value in policy.state_dict().items()}, folder / WEIGHTS_FILE)


def load_policy(folder: Path) -> ControlPolicy:
    """Load what `save_policy` wrote.

    Raises:
        ValueError: there is no policy in the folder.
    """
    if not (folder / SPEC_FILE).is_file():
        raise ValueError(f"{folder}: no control policy here ({SPEC_FILE} is missing); name a checkpoint of such a run")
    fields = json.loads((folder / SPEC_FILE).read_text())
    fields["choices"] = None if fields["choices"] is None else tuple(fields["choices"])
    policy = ControlPolicy(PolicySpec(**fields), seed=0)
    policy.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return policy
