"""Built-in reward functions, selected by the data source of a prompt (`tether.text.rewards.router`).

Each has the arguments of verl's reward functions and returns a score.
"""

from tether.text.rewards.rules.extract import last_boxed

__all__ = ["last_boxed"]
