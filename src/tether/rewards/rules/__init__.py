"""Built-in reward functions, chosen by the data source of a prompt (`tether.rewards.router`).

Each takes a solution and a ground truth, as verl's do, and returns a score.
"""

from tether.rewards.rules.extract import last_boxed

__all__ = ["extract", "gsm8k", "last_boxed", "math", "reasoning_gym", "search"]
