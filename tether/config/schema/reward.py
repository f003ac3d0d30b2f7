"""`custom_reward_function`, `reward_model`, `reward_manager`: where scores come from."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.section import (
    Count,
    Fraction,
    Inherits,
    NonNegative,
    NullIsUnset,
    Options,
    Positive,
    PositiveFloat,
    Section,
)


class CustomRewardFunctionConfig(Section):
    """A reward function of your own: f(data_source, solution_str, ground_truth, extra_info) -> number or dict."""

    path: str | None = None
    """Python file that defines it; null: the reward is chosen by data_source."""
    name: Annotated[str, NullIsUnset()] = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: Options
    """More keyword arguments of the function."""


class SandboxFusionConfig(Section):
    """`reward_model.sandbox_fusion`: a remote service that runs code."""

    url: str | None = None
    """Its address."""
    max_concurrent: Positive = 64
    """Calls at a time."""
    memory_limit_mb: Positive = 1024
    """Memory a call."""


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer`: DAPO's soft punishment of long responses."""

    enable: bool = False
    """Punish responses that come near data.max_response_length."""
    len: Count = 0
    """Tokens before that limit in which the punishment grows."""
    penalty_factor: NonNegative = 1.0
    """What a response of the full length loses; less within the buffer, in proportion."""
    log: bool = False
    """Log the punishment."""


class RewardModelConfig(Section):
    """Computation of rewards."""

    num_workers: Positive | None = 1
    """Processes that score responses; null: one a core."""
    timeout: PositiveFloat = 10.0
    """Seconds a reward call may take; then it is stopped and counts as an error. (tether's own key.)"""
    max_error_rate: Fraction = 0.1
    """The run stops when more than this share of a step's rewards are errors. (tether's own key.)"""
    reward_scale: float = 1.0
    """Factor of every score in training, before punishment of length, normalisation and KL. (RLinf's key.)"""
    use_reward_loop: bool = True
    """Score each response as soon as it is complete."""
    launch_reward_fn_async: bool = False
    """Score while log-probs are computed."""
    reward_manager: Annotated[Literal["naive", "dapo", "prime", "batch", "rate_limited", "remote"], NullIsUnset()] = (
        "naive"
    )
    """What stands between responses and the reward function."""
    reward_kwargs: Options
    """Arguments of the reward manager."""
    reward_loop_source: Annotated[str, NullIsUnset()] = "register"
    """Where the reward manager's class comes from."""
    reward_loop_module_path: str | None = None
    """Its file."""
    reward_loop_class_name: str | None = None
    """Its name."""
    overlong_buffer: OverlongBufferConfig
    sandbox_fusion: SandboxFusionConfig


class RewardManagerModuleConfig(Section):
    """`reward_manager.module`: a reward manager of your own."""

    path: str | None = None
    """Python file."""
    name: str = "custom_reward_manager"
    """Name in that file."""


class RewardManagerConfig(Section):
    """verl's newer section for the reward manager."""

    source: str = "register"
    """register: by name; importlib: from module."""
    name: Annotated[str, Inherits("reward_model.reward_manager")]
    """Name of the reward manager."""
    module: RewardManagerModuleConfig
