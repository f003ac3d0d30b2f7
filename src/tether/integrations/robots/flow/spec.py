"""The spec of a flow-matching policy, and the layout of its recorded decisions.

A decision is recorded together with the states of the denoising chain from which its log-probability is computed. For
each of the K actions, the first D columns are the action in the model's scale, and the others are 1/K of the entries of
the chain.
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
    """Describes a policy, sufficient to create it again."""

    model_type: Literal["pi0", "pi05"]
    layout: ObsLayout
    """The fields of an observation."""
    action_dim: int
    """D: columns of an action of the environment."""
    action_scale: Scale
    state_scale: Scale
    """Scale of the numbers of an observation."""
    num_action_chunks: int = 1
    """K: actions of a decision that are executed."""
    horizon: int = 1
    """H >= K: actions that the network generates."""
    latent_dim: int = 1
    """A >= D: columns of an action in the network; the environment uses the first D."""
    state_dim: int = 1
    """Width of the network's state input; the numbers of an observation are padded with zeros."""
    prompt_length: int = 48
    """Number of tokens of the padded prompt."""
    tokenizer: str | None = None
    """Folder of a tokenizer; None: the bytes of the prompt are its tokens."""
    image_size: int = 224
    """Height and width to which images are scaled."""
    sizes: Mapping[str, int] | None = None
    """Sizes of the networks (`tether.integrations.robots.flow.backbone.Sizes`); None: lerobot's, with 3.3 billion
    parameters.
    """
    relative_actions: int = 0
    """Number of leading action columns that are relative to the same columns of the state, as in pi0 for LIBERO; the
    network generates the difference."""
    discrete_state_input: bool = True
    """Whether pi0.5's prompt includes the state; otherwise the policy does not see it."""
    empty_cameras: int = 0
    """Number of images that the network expects in addition to the environment's."""
    value_width: int = 1
    """V: values per observation: 1, or K, one for the state before each action of the chunk; 0: no critic."""
    num_steps: int = 4
    """N: number of denoising steps."""
    noise_method: NoiseMethod = "flow_sde"
    noise_level: float = 0.5
    noise_logvar_range: tuple[float, float] = (0.08, 0.16)
    """Minimum and maximum standard deviation of ``flow_noise``."""
    joint_logprob: bool = False
    """Whether every denoising step is random, instead of a single one that is drawn for each decision."""
    step_logprobs: Literal["sum", "mean"] = "sum"
    """Log-prob of a chain: the sum over its random steps, or RLinf's mean over the start and all steps."""
    detach_critic_input: bool = False
    train_expert_only: bool = False
    choices: None = field(default=None, init=False)
    """None, because actions are continuous."""

    @property
    def parts(self) -> ObsLayout:
        """The fields of an observation."""
        return self.layout

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the images."""
        return tuple(field.name for field in self.layout if field.kind == "image")

    @property
    def text(self) -> str | None:
        """Name of the text; None without a text."""
        return next((field.name for field in self.layout if field.kind == "text"), None)

    @property
    def random_steps(self) -> int:
        """S: denoising steps that may be random; the last one of ``flow_cps`` has no noise."""
        return self.num_steps - (self.noise_method == "flow_cps")

    @property
    def latents(self) -> int:
        """Number of entries of a state of the chain."""
        return self.horizon * self.latent_dim

    @property
    def recorded(self) -> int:
        """Number of entries of `tether.integrations.robots.flow.chain.Record` that are recorded in addition to the
        actions.
        """
        if self.joint_logprob:
            return self.num_steps * self.latents
        return 1 + self.latents + self.num_action_chunks * self.action_dim

    @property
    def action_width(self) -> int:
        """Number of columns of a recorded action."""
        return self.action_dim + math.ceil(self.recorded / self.num_action_chunks)
