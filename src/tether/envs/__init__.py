"""Vector environments: one interface (`tether.envs.protocol`) over all the ways in which simulators are stepped.

`make` builds one from its options: a simulator of `adapters`, stepped together with others by `vectorization`, with its
observations and actions described by `spaces`.
"""

from tether.envs.protocol import (
    ContinuousActions,
    DiscreteActions,
    EnvState,
    EnvStep,
    Flags,
    Floats,
    Renders,
    VectorEnv,
)

__all__ = [
    "ContinuousActions",
    "DiscreteActions",
    "EnvState",
    "EnvStep",
    "Flags",
    "Floats",
    "Renders",
    "VectorEnv",
    "gymnasium_types",
    "make",
    "spaces",
    "vectorization",
]
