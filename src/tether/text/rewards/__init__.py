"""Rewards: rules, user functions, and the processes that run them. This package does not import torch.

A reward is a score, an abstention or an error (`RewardOutcome`); `RewardReport` counts the errors, and a run stops
above a configured rate. `rules` has the built-in functions, `sandbox` runs programs in responses, `judge` queries
language models for scores, `service` calls rewards for all responses, and `audit` tests a reward on replies of known
quality.
"""

from tether.text.rewards.outcome import (
    Abstention,
    Dialogue,
    ErrorSample,
    RewardError,
    RewardFailure,
    RewardOutcome,
    RewardReport,
    RewardRequest,
    Score,
    check_error_rate,
    is_float32,
    summarize,
)
from tether.text.rewards.router import check_source, check_sources, check_truth, has_tests

__all__ = [
    "Abstention",
    "Dialogue",
    "ErrorSample",
    "RewardError",
    "RewardFailure",
    "RewardOutcome",
    "RewardReport",
    "RewardRequest",
    "Score",
    "check_error_rate",
    "check_source",
    "check_sources",
    "check_truth",
    "has_tests",
    "is_float32",
    "summarize",
]
