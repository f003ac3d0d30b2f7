"""Built-in reward functions, selected by the data source of a prompt (`tether.rewards.router`).

Each has the arguments of verl's reward functions and returns a score.
"""

from tether.rewards.rules.extract import last_boxed

__all__ = ["extract", "gsm8k", "last_boxed", "math", "reasoning_gym", "search"]
