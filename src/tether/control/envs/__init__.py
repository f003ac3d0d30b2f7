"""Vector environments: one interface (`tether.control.envs.protocol`) for every way of stepping simulators.

`make` builds one from its options. `adapters` create simulators, `vectorization` steps several of them together, and
`spaces` converts their observations and actions.
"""

from tether.control.envs.protocol import (
    ContinuousActions,
    DiscreteActions,
    EnvState,
    EnvStep,
    Flags,
    Floats,
    Renders,
    VectorEnv,
)

__all__ = ["ContinuousActions", "DiscreteActions", "EnvState", "EnvStep", "Flags", "Floats", "Renders", "VectorEnv"]
