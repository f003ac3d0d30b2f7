"""Builds the objects of a run from a validated configuration: the only package that reads configuration.

`build` builds a run of either kind: `run` of text, `control` in simulators. The other modules build what a single
command
needs. They load torch and transformers, so a command imports only the one that it needs, when it needs it.
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
