"""Rewards: rules, user functions, and the processes that run them. This package does not import torch.

A reward is a score, an abstention or an error (`RewardOutcome`); `RewardReport` counts the errors, and a run stops
above a configured rate. `rules` has the built-in functions, `sandbox` runs programs in responses, `judge` queries
language models for scores, `service` calls rewards for all responses, and `audit` tests a reward on replies of known
quality.
"""
