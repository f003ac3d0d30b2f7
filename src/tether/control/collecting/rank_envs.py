"""The environments of one of several ranks, and the copy of the policy that acts in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from tether.batch import EnvBatch
from tether.control.collecting.collector import EnvCollector
from tether.control.envs import ContinuousActions, DiscreteActions, EnvState, VectorEnv
from tether.control.policies import Policy
from tether.observations import ObsLayout
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.types import StateDict


class RankEnvs:
    """The rank's side of `tether.control.sharded.ShardedCollector` and `ShardedEnvs`.

    Args:
        env: the environments of this rank, without wrappers.
        collector: steps them, possibly through a wrapper.
        policy: the acting policy, which an engine trains.
    """

    def __init__(self, env: VectorEnv, collector: EnvCollector, policy: Policy) -> None:
        self._env, self._collector, self._policy = env, collector, policy

    def describe(self) -> tuple[str, int, ObsLayout, ContinuousActions | DiscreteActions]:
        """Return id, number, observation layout and actions of the environments."""
        return self._env.id, self._env.num_envs, self._env.layout, self._env.actions

    def nbytes(self) -> int:
        """Return `EnvCollector.nbytes`."""
        return self._collector.nbytes

    def collect(self, noise: Tensor, seeds: Sequence[int]) -> tuple[EnvBatch, float, list[str]]:
        """Run `EnvCollector.collect`; also returns the seconds spent in environments and the warnings that were
        issued."""
        waited = self._collector.env_seconds
        with _collected_warnings() as messages:
            batch = self._collector.collect(self._policy.acting(), noise, seeds)
        return replace(batch, obs=batch.obs.contiguous()), self._collector.env_seconds - waited, messages

    def restart(self, seed: int) -> None:
        self._collector.restart(seed)

    def state_dict(self) -> StateDict:
        return self._collector.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._collector.load_state_dict(state)

    def get_state(self) -> EnvState:
        """Return `VectorEnv.get_state`, extended by the state of this process's global random generators."""
        state = self._env.get_state()
        return replace(state, data=(rng_state(), state.data))

    def set_state(self, data: tuple[StateDict, object]) -> str | None:
        """Run `VectorEnv.set_state`; returns the error message if the state does not fit."""
        rng, state = data
        try:
            self._env.set_state(state)
        except ValueError as error:
            return str(error)
        set_rng_state(rng)
        return None


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect warnings in a list instead of showing them."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield messages
    messages += [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
