"""Environments in several stages that take turns: while one steps, the policy decides for the next.

A stage steps in a thread of its own, which only waits: for worker processes, or for envpool's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.envs.protocol import EnvState, EnvStep, Floats, VectorEnv


class StagedEnv:
    """N environments that are stepped stage by stage.

    Args:
        stages: the environments of each stage, in order; their seeds are those of one set.
    """

    def __init__(self, stages: Sequence[VectorEnv]) -> None:
        first = stages[0]
        self.id, self.obs_dim, self.layout, self.actions = first.id, first.obs_dim, first.layout, first.actions
        self.num_envs = sum(stage.num_envs for stage in stages)
        ends = accumulate((stage.num_envs for stage in stages), initial=0)
        self.parts = [slice(begin, end) for begin, end in pairwise(ends)]
        """Environments of each stage."""
        self._stages = stages
        self._pool = ThreadPoolExecutor(len(stages), thread_name_prefix="stage")
        self._running: dict[int, Future[EnvStep]] = {}

    def wrap(self, wrapper: Callable[[VectorEnv], VectorEnv]) -> None:
        """Put something around each stage that may take other actions."""
        self._stages = [wrapper(stage) for stage in self._stages]
        self.actions = self._stages[0].actions

    def reset(self, seed: int) -> Floats:
        """See `VectorEnv.reset`."""
        return np.concatenate([stage.reset(seed) for stage in self._stages])

    def send(self, part: int, actions: NDArray[Any]) -> None:
        """Begin a step of one stage: [environments of the stage, width]."""
        self._running[part] = self._pool.submit(self._stages[part].step, actions)

    def receive(self, part: int) -> EnvStep:
        """Wait for the step that `send` began; its rows are the environments of the stage."""
        return self._running.pop(part).result()

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        states = [stage.get_state() for stage in self._stages]
        left_out = dict.fromkeys(reason for state in states for reason in state.left_out)
        return EnvState([state.data for state in states], tuple(left_out))

    def set_state(self, data: Any) -> None:
        """See `VectorEnv.set_state`."""
        if len(data) != len(self._stages):
            raise ValueError(f"saved of {len(data)} stages, now {len(self._stages)}")
        for stage, state in zip(self._stages, data, strict=True):
            stage.set_state(state)

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._pool.shutdown()
        for stage in self._stages:
            stage.close()


class OneStage:
    """Makes one stage of environments that step in the caller's thread, when their step is received.

    Args:
        env: the environments.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.parts = [slice(0, env.num_envs)]
        self._env = env
        self._actions: NDArray[Any] | None = None

    def send(self, part: int, actions: NDArray[Any]) -> None:
        """See `StagedEnv.send`."""
        self._actions = actions

    def receive(self, part: int) -> EnvStep:
        """See `StagedEnv.receive`."""
        assert self._actions is not None
        return self._env.step(self._actions)
