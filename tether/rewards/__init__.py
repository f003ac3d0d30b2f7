"""Rewards: rules, user functions, and the processes that run them. Imports no torch."""
