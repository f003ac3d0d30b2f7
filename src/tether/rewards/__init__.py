"""Rewards: rules, user functions, and the processes that run them. This package does not import torch.

A reward is a score, an abstention or an error (`RewardOutcome`); `RewardReport` counts the errors, and a run stops
above a configured rate. `rules` has the built-in functions, `sandbox` runs programs in responses, `judge` queries
language models for scores, `service` calls rewards for all responses, and `audit` tests a reward on replies of known
quality.
"""

from tether.rewards.outcome import (
    Abstention,
    Dialogue,
    RewardError,
    RewardFailure,
    RewardOutcome,
    RewardRequest,
    Score,
    is_float32,
)
from tether.rewards.router import check_source, check_sources, check_truth, has_tests
from tether.rewards.summary import ErrorSample, RewardReport, check_error_rate, summarize

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
    "audit",
    "check_error_rate",
    "check_source",
    "check_sources",
    "check_truth",
    "custom",
    "has_tests",
    "is_float32",
    "judge",
    "rules",
    "sandbox",
    "service",
    "summarize",
]
