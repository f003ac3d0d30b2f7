"""The protocol of vector environments: N of them, stepped together, that begin new episodes by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tether.observations import Array, Observation, ObsLayout

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class DiscreteActions:
    """Choices: column i of an action is one of `choices[i]` numbers, from 0 on."""

    choices: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns of an action."""
        return len(self.choices)


@dataclass(frozen=True)
class ContinuousActions:
    """Numbers, which the environment clips to its bounds."""

    width: int
    """Columns of an action."""
    low: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """The bounds of each column."""
    high: tuple[float, ...] = field(default=(), repr=False, compare=False)


ActionSpec = DiscreteActions | ContinuousActions
Saved: TypeAlias = Any
"""State that an environment can take over again; picklable."""


@dataclass(frozen=True)
class EnvStep:
    """The result of one step of N environments. The arrays may be overwritten by the next step."""

    obs: Observation
    """[N, ...]: what the next actions are chosen from; of a new episode where one has just ended."""
    reward: Floats
    """[N]"""
    terminated: Flags
    """[N]: the episode ended by itself: nothing comes after it."""
    truncated: Flags
    """[N]: the episode was cut, by a time limit for example: what would have come has a value."""
    final_obs: Observation | None = None
    """[N, ...]: the last observation of the episodes that ended in this step, before any reset; the rows of the others
    mean nothing. None where no episode ended."""
    valid: Flags | None = None
    """[N]: False where no action was carried out: the step only began a new episode; or the environment waits for one
    (`HeldEnv`); or its process died, and the episode with it, which is then truncated, too. None: all are valid."""
    success: Flags | None = None
    """[N]: the task is solved in this step, where the environment tells."""
    told: Mapping[str, Floats] | None = None
    """Name -> [N]: numbers in the infos of the episodes that ended in this step, NaN for the others. None where no
    episode ended, or none is asked for."""


@dataclass(frozen=True)
class EnvState:
    """The saved state of environments."""

    data: Saved
    left_out: tuple[str, ...] = ()
    """Parts that could not be saved, each with the reason. If there are any, new episodes begin after a checkpoint."""


class VectorEnv(Protocol):
    """N environments."""

    id: str
    num_envs: int
    layout: ObsLayout
    """The parts of an observation."""
    actions: ActionSpec

    def reset(self, seed: int) -> Observation:
        """Begin new episodes everywhere; returns [N, ...]. Equal seeds and actions give equal steps."""
        ...

    def step(self, actions: Array) -> EnvStep:
        """Carry out one action in each environment: [N, width], integers for choices, else floats."""
        ...

    def get_state(self) -> EnvState:
        """The state from which the episodes continue, in another process, too, once `set_state` was given it."""
        ...

    def set_state(self, data: Saved) -> None:
        """Take over the `EnvState.data` of the same environments.

        Raises:
            ValueError: they are others.
        """
        ...

    def close(self) -> None:
        """End subprocesses and free what the simulators hold."""
        ...


class Renders(Protocol):
    """Environments that show the first of them."""

    def render(self) -> NDArray[np.uint8]:
        """Picture [H, W, 3] of the first environment as it is now."""
        ...


class HeldEnv(Protocol):
    """N environments that wait after an episode's end until they are reset."""

    id: str
    num_envs: int
    layout: ObsLayout
    actions: ActionSpec

    def begin(self, seeds: Mapping[int, int | None]) -> Observation:
        """Begin new episodes in these environments, whatever they were at; returns the observations of all, [N, ...].

        Args:
            seeds: environment -> seed of its episode; None: its generator goes on.
        """
        ...

    def step(self, actions: Array) -> EnvStep:
        """Carry out one action in each environment that is not waiting; the others have no valid step."""
        ...

    def render(self) -> NDArray[np.uint8]:
        """See `Renders.render`."""
        ...

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        ...

    def set_state(self, data: Saved) -> None:
        """See `VectorEnv.set_state`."""
        ...

    def close(self) -> None:
        """See `VectorEnv.close`."""
        ...
