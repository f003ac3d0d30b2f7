"""Turns a checked configuration into the objects of a run: the only package that reads configuration.

`run` makes a whole run, `build` its parts from the object of a user's own code; the other modules make what one command
needs. They load torch and transformers, so that a command imports the one that it needs, when it needs it.
"""

__all__ = [
    "agent",
    "build",
    "cloning",
    "common",
    "control",
    "generator",
    "named_inputs",
    "policies",
    "reward_training",
    "run",
    "standalone",
]
