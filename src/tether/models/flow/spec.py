"""The shape of a flow-matching policy, and how its decisions are laid out as columns of numbers.

A decision is recorded with the states of the denoising chain that its log-probability is computed from. They stand
beside the actions: of each of the K actions the first D columns are what the environment takes, in the model's scale,
and the rest is its share of the chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tether.observations import ObsLayout

NoiseMethod = Literal["flow_sde", "flow_noise", "flow_cps"]
Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Offsets and scales of columns: a value in the model's scale is (value - offset) / scale."""


@dataclass(frozen=True)
class FlowSpec:
    """The shape of a policy: enough to build it again."""

    model_type: Literal["pi0", "pi05"]
    layout: ObsLayout
    """The parts of an observation."""
    action_dim: int
    """D: columns of an action of the environment."""
    action_scale: Scale
    state_scale: Scale
    """Of the numbers of an observation."""
    num_action_chunks: int = 1
    """K: actions of a decision that are carried out."""
    horizon: int = 1
    """H >= K: actions that the network generates."""
    latent_dim: int = 1
    """A >= D: columns of an action in the network; the environment takes the first D."""
    state_dim: int = 1
    """Numbers of an observation in the network; what is missing is zero."""
    prompt_length: int = 48
    """Tokens of the prompt, padded."""
    tokenizer: str | None = None
    """Folder of a tokenizer; None: the bytes of the prompt are its tokens."""
    image_size: int = 224
    """Height and width that pictures are scaled to."""
    sizes: Mapping[str, int] | None = None
    """Of the networks (`tether.models.flow.backbone.Sizes`); None: lerobot's own, with 3.3 billion parameters."""
    empty_cameras: int = 0
    """Pictures that the network knows and the environment does not show."""
    value_width: int = 1
    """V: values of an observation: 1, or K, one before each action of the chunk; 0: there is no critic."""
    num_steps: int = 4
    """N: denoising steps."""
    noise_method: NoiseMethod = "flow_sde"
    noise_level: float = 0.5
    noise_logvar_range: tuple[float, float] = (0.08, 0.16)
    """Least and largest standard deviation of ``flow_noise``."""
    joint_logprob: bool = False
    """Every denoising step is random, not one that is drawn for each decision."""
    step_logprobs: Literal["sum", "mean"] = "sum"
    """Of random steps: the density of the chain, or RLinf's mean over the start and all steps."""
    detach_critic_input: bool = False
    train_expert_only: bool = False
    choices: None = field(default=None, init=False)
    """Actions are numbers."""

    @property
    def parts(self) -> ObsLayout:
        """The parts of an observation."""
        return self.layout

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the pictures."""
        return tuple(part.name for part in self.layout if part.kind == "image")

    @property
    def text(self) -> str | None:
        """Name of the text; None: there is none."""
        return next((part.name for part in self.layout if part.kind == "text"), None)

    @property
    def random_steps(self) -> int:
        """S: denoising steps that may be random: the last one of ``flow_cps`` has no noise."""
        return self.num_steps - (self.noise_method == "flow_cps")

    @property
    def latents(self) -> int:
        """Numbers of a state of the chain."""
        return self.horizon * self.latent_dim

    @property
    def recorded(self) -> int:
        """Numbers of the chain that a decision keeps beside its actions: see `tether.models.flow.chain.Record`."""
        if self.joint_logprob:
            return self.num_steps * self.latents
        return 1 + self.latents + self.num_action_chunks * self.action_dim

    @property
    def action_width(self) -> int:
        """Columns of an action as it is recorded."""
        return self.action_dim + math.ceil(self.recorded / self.num_action_chunks)
