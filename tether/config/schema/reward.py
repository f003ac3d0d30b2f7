"""`custom_reward_function`, `reward_model`, `reward_manager`: where scores come from."""

from __future__ import annotations

from typing import Annotated

from tether.config.schema.section import (
    ActsIf,
    Count,
    Fraction,
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


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer`: DAPO's soft punishment of long responses."""

    enable: bool = False
    """Punish responses that come near data.max_response_length."""
    len: Count = 0
    """Tokens before that limit in which the punishment grows."""
    penalty_factor: NonNegative = 1.0
    """What a response of the full length loses; less within the buffer, in proportion."""


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
    overlong_buffer: Annotated[OverlongBufferConfig, ActsIf("reward_model.overlong_buffer.enable", on=(True,))]
