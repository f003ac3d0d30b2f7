"""The protocol of vector environments: N environments stepped together, with automatic reset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tether.observations import Array, Observation, ObsLayout

if TYPE_CHECKING:
    from tether.control.envs.spaces import Spaces

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class DiscreteActions:
    """Discrete actions: column i of an action is an integer from 0 to `choices[i] - 1`."""

    choices: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns of an action."""
        return len(self.choices)


@dataclass(frozen=True)
class ContinuousActions:
    """Continuous actions, which the environment clips to its bounds."""

    width: int
    """Columns of an action."""
    low: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """Lower bound of each column."""
    high: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """Upper bound of each column."""


@dataclass(frozen=True)
class MixedActions:
    """Choices and continuous actions together; the columns of choices come first, as whole numbers of float32."""

    choices: tuple[int, ...]
    numbers: ContinuousActions

    @property
    def width(self) -> int:
        """Columns of an action."""
        return len(self.choices) + self.numbers.width


ActionSpec = DiscreteActions | ContinuousActions | MixedActions


def choices_of(actions: ActionSpec) -> tuple[int, ...]:
    """Return the number of alternatives of each column that is a choice."""
    return () if isinstance(actions, ContinuousActions) else actions.choices


NO_SEED = -1
"""Seed of an episode that was reset without one: the generator of its environment continued."""

Saved: TypeAlias = Any
"""Picklable state of an environment, for `set_state`."""


@dataclass(frozen=True)
class EnvStep:
    """The result of one step of N environments. The arrays may be overwritten by the next step."""

    obs: Observation
    """[N, ...]: observations for the next actions; the first of a new episode if one has just ended."""
    reward: Floats
    """[N]: rewards of the step."""
    terminated: Flags
    """[N]: the episode reached a terminal state, whose value is 0."""
    truncated: Flags
    """[N]: the episode was cut, for example by a time limit, so that its value is bootstrapped."""
    final_obs: Observation | None = None
    """[N, ...]: last observation of the episodes that ended in this step, before the reset; other rows are undefined.
    None if no episode ended."""
    valid: Flags | None = None
    """[N]: False if no action was carried out: the step only reset the environment, or the environment waits for a
    reset (`HeldEnv`), its agent does not act (a PufferEnv), or its process died (the episode is then truncated, too).
    None: all are valid."""
    success: Flags | None = None
    """[N]: the task was solved in this step. None if the environment does not report it."""
    info_values: Mapping[str, Floats] | None = None
    """Name -> [N]: recorded numbers from the infos of the episodes that ended in this step, else NaN. None if no
    episode ended, or none are configured."""


@dataclass(frozen=True)
class EnvState:
    """The state of environments at a checkpoint."""

    data: Saved
    left_out: tuple[str, ...] = ()
    """What could not be saved, each with the reason. If not empty, resuming begins new episodes."""


class VectorEnv(Protocol):
    """N environments that are stepped together and reset themselves."""

    id: str
    num_envs: int
    layout: ObsLayout
    """The named arrays of an observation."""
    actions: ActionSpec
    spaces: Spaces
    """Of the observations and actions of one environment."""

    def reset(self, seed: int) -> Observation:
        """Begin new episodes and return their observations [N, ...]. Equal seeds and actions give equal steps."""
        ...

    def step(self, actions: Array) -> EnvStep:
        """Carry out one action per environment: [N, width], integers for discrete actions, else floats."""
        ...

    def get_state(self) -> EnvState:
        """Return the state from which `set_state` continues the episodes, also in another process."""
        ...

    def set_state(self, data: Saved) -> None:
        """Restore the `EnvState.data` of the same environments.

        Raises:
            ValueError: the state is of different environments.
        """
        ...

    def close(self) -> None:
        """End subprocesses and free the simulators' resources."""
        ...


class SteppedInGroups(Protocol):
    """Environments of which groups step independently of each other."""

    id: str
    num_envs: int
    groups: Sequence[slice]
    """The environments of each group."""

    def send_step(self, group: int, actions: Array) -> None:
        """Begin a step of a group's environments, with their actions."""
        ...

    def receive_steps(self, stepping: Collection[int], seconds: float) -> list[tuple[int, EnvStep]]:
        """Return the finished steps of groups among `stepping`; empty if none finishes within the time."""
        ...


class PolicyArrays(NamedTuple):
    """A perceptron and its head as contiguous arrays of float32, for code that is compiled.

    It acts on (observation - shift) * scale, within -clip to clip.
    """

    activation: str | None
    """Between the layers: ``tanh``, ``relu`` or ``elu``."""
    weights: tuple[Floats, ...]
    """[in, out] of each layer."""
    biases: tuple[Floats, ...]
    """[out] of each layer."""
    shift: Floats
    scale: Floats
    clip: Floats
    """[O]: bound of each number that is normalised."""
    std: Floats
    """[D]: an action is the output plus std * noise. Empty: it is the index of the largest output plus noise."""


class RolloutRows(NamedTuple):
    """What a rollout of T steps writes; views of the collector's buffers."""

    obs: Floats
    """[N, T + 1, O]: [:, 0] is given; after an end, the first observation of the next episode."""
    actions: Array
    """[N, T, D]: as the policy chose them, not cut to bounds; int64 for choices."""
    rewards: Floats
    """[N, T], as `terminated` and `truncated` are."""
    terminated: Flags
    truncated: Flags
    last_obs: Floats
    """[N, T, O]: the last observation of an episode that ends in the step; other rows are not read."""


Rollout: TypeAlias = Callable[[PolicyArrays, Floats, RolloutRows], None]
"""(policy; noise [T, N, outputs]; rows to write) carries out T steps of N environments in one call, up to rounding as T
calls of `VectorEnv.step` do. Environments may have it as ``rollout``."""


class Renders(Protocol):
    """Environments that can render the first one."""

    def render(self) -> NDArray[np.uint8]:
        """Return a picture [H, W, 3] of the first environment."""
        ...


class HeldEnv(Protocol):
    """N environments that wait after the end of an episode until they are reset."""

    id: str
    num_envs: int
    layout: ObsLayout
    actions: ActionSpec
    spaces: Spaces
    seeds: NDArray[np.int64]
    """[N]: seed with which the current episode of each environment was reset, or `NO_SEED`; changed in place."""

    def begin(self, seeds: Mapping[int, int | None]) -> Observation:
        """Begin new episodes in some environments; return the observations of all, [N, ...].

        Args:
            seeds: environment -> seed of its episode; None: its generator continues.
        """
        ...

    def step(self, actions: Array) -> EnvStep:
        """Carry out one action in each environment that is not waiting; the steps of waiting ones are not valid."""
        ...

    def render(self) -> NDArray[np.uint8]: ...

    def get_state(self) -> EnvState: ...

    def set_state(self, data: Saved) -> None: ...

    def close(self) -> None: ...
