"""Rewards: rules, user functions, and the processes that run them. Imports no torch.

A reward is a score, an abstention or an error (`RewardOutcome`); `RewardReport` counts errors and stops a run above a
set rate. `rules` has the built-in functions, `sandbox` runs the programs of responses, `judge` has models that are
asked for a score, `service` has what calls them all, `audit` tries a reward on replies whose worth is known.
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
