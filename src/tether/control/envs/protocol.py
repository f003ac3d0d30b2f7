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
    """Discrete actions: column i of an action is an integer from 0 to ``choices[i] - 1``."""

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
    """Discrete and continuous columns in one action; discrete ones come first, as integers in float32."""

    choices: tuple[int, ...]
    numbers: ContinuousActions

    @property
    def width(self) -> int:
        """Columns of an action."""
        return len(self.choices) + self.numbers.width


ActionSpec = DiscreteActions | ContinuousActions | MixedActions


def choices_of(actions: ActionSpec) -> tuple[int, ...]:
    """Return the number of alternatives of each discrete column."""
    return () if isinstance(actions, ContinuousActions) else actions.choices


NO_SEED = -1
"""Marks an episode that was reset without a seed, so that its environment's generator continued."""

Saved: TypeAlias = Any
"""Picklable state of an environment, for `set_state`."""


@dataclass(frozen=True)
class EnvStep:
    """The result of one step of N environments. The arrays may be overwritten by the next step."""

    obs: Observation
    """[N, ...]: observations for the next actions; the first one of the next episode if one has just ended."""
    reward: Floats
    """[N]: rewards of the step."""
    terminated: Flags
    """[N]: whether the episode reached a terminal state, whose value is 0."""
    truncated: Flags
    """[N]: whether the episode was cut off, for example by a time limit, so that its value is bootstrapped."""
    final_obs: Observation | None = None
    """[N, ...]: last observation of the episodes that ended in this step, before the reset; other rows are undefined.
    None if no episode ended."""
    valid: Flags | None = None
    """[N]: whether an action was executed. It was not if the step only reset the environment, the environment waits
    for a reset (`ManualResetEnv`), its agent does not act (a PufferEnv), or its process died (then the episode is
    truncated, too). None: all are valid."""
    success: Flags | None = None
    """[N]: whether the task is solved in this step. None if the environment does not report it."""
    info_values: Mapping[str, Floats] | None = None
    """Name -> [N]: recorded numbers from the infos of the episodes that ended in this step; NaN for other environments.
    None if no episode ended or no numbers are configured."""


@dataclass(frozen=True)
class EnvState:
    """The state of environments at a checkpoint."""

    data: Saved
    left_out: tuple[str, ...] = ()
    """Descriptions of state that could not be saved, with reasons. If not empty, resuming begins new episodes."""


class VectorEnv(Protocol):
    """N environments that are stepped together and reset themselves."""

    id: str
    num_envs: int
    layout: ObsLayout
    """The named arrays of an observation."""
    actions: ActionSpec
    spaces: Spaces
    """The observation space and the action space of one environment."""

    def reset(self, seed: int) -> Observation:
        """Begin new episodes and return their observations [N, ...]. Equal seeds and actions give equal steps."""
        ...

    def step(self, actions: Array) -> EnvStep:
        """Execute one action per environment: [N, width], integers for discrete actions, otherwise floats."""
        ...

    def get_state(self) -> EnvState:
        """Return the state from which `set_state` can continue the episodes, also in another process."""
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


class GroupSteppedEnv(Protocol):
    """Environments in groups that step independently of each other."""

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
    """A perceptron and its head as contiguous float32 arrays, for compiled code.

    The perceptron's input is (observation - shift) * scale, clipped to [-clip, clip].
    """

    activation: str | None
    """Nonlinearity between the layers: ``tanh``, ``relu`` or ``elu``."""
    weights: tuple[Floats, ...]
    """[in, out] of each layer."""
    biases: tuple[Floats, ...]
    """[out] of each layer."""
    shift: Floats
    scale: Floats
    clip: Floats
    """[O]: bound of the absolute value of each normalised input."""
    std: Floats
    """[D]: an action is the output plus std * noise. Empty: an action is the argmax of outputs plus noise."""


class RolloutRows(NamedTuple):
    """Arrays that a rollout of T steps fills; views of the collector's buffers."""

    obs: Floats
    """[N, T + 1, O]: [:, 0] is an input; after the end of an episode, the first observation of the next one."""
    actions: Array
    """[N, T, D]: actions as the policy chose them, not clipped to bounds; int64 for discrete actions."""
    rewards: Floats
    """[N, T], like `terminated` and `truncated`."""
    terminated: Flags
    truncated: Flags
    last_obs: Floats
    """[N, T, O]: the last observation of the episode that ends in a step; other entries are not read."""


Rollout: TypeAlias = Callable[[PolicyArrays, Floats, RolloutRows], None]
"""(policy; noise [T, N, outputs]; rows to fill) executes T steps of N environments in one call, equal to T calls of
`VectorEnv.step` up to rounding. Environments may provide it as ``rollout``."""


class Renders(Protocol):
    """Environments that can render the first one."""

    def render(self) -> NDArray[np.uint8]:
        """Return an image [H, W, 3] of the first environment."""
        ...


class ManualResetEnv(Protocol):
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
            seeds: environment -> seed of its episode; None: the environment's generator continues.
        """
        ...

    def step(self, actions: Array) -> EnvStep:
        """Execute one action in each environment that is not waiting; the steps of waiting ones are not valid."""
        ...

    def render(self) -> NDArray[np.uint8]: ...

    def get_state(self) -> EnvState: ...

    def set_state(self, data: Saved) -> None: ...

    def close(self) -> None: ...
