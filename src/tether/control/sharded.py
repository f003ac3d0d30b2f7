"""Handles of the environments and the policy of control on many ranks, like `tether.text.sharded`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tether.batch import EnvBatch
from tether.control.envs import ContinuousActions, DiscreteActions, EnvState
from tether.control.learning.losses import RolloutOutputs, Samples, dealt
from tether.control.policies import Act
from tether.distributed.handles import EngineHandle
from tether.distributed.worker import Group
from tether.loop.engines.protocol import Forward, LossSpec, Updated, UpdatePlan
from tether.observations import ObsLayout
from tether.types import StateDict


class ShardedFlatEngine(EngineHandle):
    """The engine of control on many ranks, with a `FlatRankEngine` on each; arguments are those of `EngineHandle`."""

    def infer(self, batch: EnvBatch, forward: Forward[Any, RolloutOutputs]) -> RolloutOutputs:
        shares = [batch.select_rows(range(*bounds)) for bounds in _bounds(len(batch.actions), self._group.size)]
        outputs: list[RolloutOutputs] = self._call("infer", [(rows, forward) for rows, _ in shares])
        bootstrap_values = _joined([output.bootstrap_values for output in outputs])
        if bootstrap_values is not None:
            bootstrap_values = bootstrap_values[torch.cat([finals for _, finals in shares]).argsort()]
        return RolloutOutputs(
            torch.cat([output.log_probs for output in outputs]),
            torch.cat([output.seen for output in outputs]),
            _joined([output.values for output in outputs]),
            bootstrap_values,
        )

    def update(self, batch: Samples, loss: LossSpec[Any, Any], plan: UpdatePlan, step: int) -> Updated[RolloutOutputs]:
        # Each observation goes to one rank, other columns to all.
        shares = dealt(batch, self._group.size)
        arguments = [(rows, seen, loss, plan, step) for rows, seen in shares]
        updated: Updated[RolloutOutputs] = self._call("learn", arguments)[0]
        self.version += 1
        return updated

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        # Every rank has all weights, and the first one writes them.
        others = [None] * (self._group.size - 1)
        self._call("begin_saving", [(folder, state), *others])
        return partial(self._wait_until_written, [(), *others])


class ShardedEnvs:
    """The `VectorEnv` of all ranks' environments, in the order of ranks, which step them.

    Args:
        group: the ranks.
        component: key of the `RankEnvs` on the ranks.
    """

    def __init__(self, group: Group, component: str) -> None:
        self._group, self._component = group, component
        descriptions: list[tuple[str, int, ObsLayout, ContinuousActions | DiscreteActions]] = self.call("describe", ())
        self.id, _, self.layout, self.actions = descriptions[0]
        self.counts = [count for _, count, _, _ in descriptions]
        self.num_envs = sum(self.counts)

    @property
    def slices(self) -> list[slice]:
        """Return the indices of each rank's environments."""
        return [slice(*bounds) for bounds in pairwise([0, *accumulate(self.counts)])]

    def call(self, method: str, *arguments: tuple[object, ...]) -> list[Any]:
        """Call a method on all ranks, and return their results.

        Args:
            method: a method of `RankEnvs`.
            arguments: arguments of each rank, or one tuple for all of them.
        """
        by_rank = list(arguments) if len(arguments) > 1 else list(arguments) * self._group.size
        return self._group.call(self._component, method, by_rank)

    def get_state(self) -> EnvState:
        states: list[EnvState] = self.call("get_state", ())
        left_out = dict.fromkeys(reason for state in states for reason in state.left_out)
        return EnvState([state.data for state in states], tuple(left_out))

    def set_state(self, data: Any) -> None:
        refused = next(filter(None, self.call("set_state", *[(rank_state,) for rank_state in data])), None)
        if refused:
            raise ValueError(refused)

    def close(self) -> None:
        """Do nothing: environments end with their ranks."""


class ShardedCollector:
    """The collector of many ranks, with an `EnvCollector` on each.

    Args:
        envs: the environments.
        steps: T, the steps of a rollout.
        chunk: K, the actions of a decision.
        epochs: E, the rollouts of a training step.
    """

    def __init__(self, envs: ShardedEnvs, steps: int, *, chunk: int, epochs: int) -> None:
        self.env, self.steps, self.chunk, self.epochs = envs, steps, chunk, epochs
        self.env_seconds = 0.0
        self.nbytes = sum(envs.call("nbytes", ()))

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        """Return the shape of the noise of `collect`: epochs, decisions, environments."""
        return self.epochs, self.steps // self.chunk, self.env.num_envs

    def collect(self, act: Act, noise: Tensor, seeds: Sequence[int] = ()) -> EnvBatch:
        """Collect a rollout; each rank acts with its own copy of the policy of `act`.

        Warnings of ranks, for example of a simulator that was replaced, are issued by this process.
        """
        # Without clone, the noise of all ranks would be sent to each.
        arguments = [(noise[:, :, envs].clone(), list(seeds)) for envs in self.env.slices]
        results = self.env.call("collect", *arguments)
        self.env_seconds += max(seconds for _, seconds, _ in results)
        for message in dict.fromkeys(message for _, _, messages in results for message in messages):
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return self._joined_batch([batch for batch, _, _ in results])

    def restart(self, seed: int) -> None:
        """Restart all environments, as `EnvCollector.restart` does."""
        self.env.call("restart", (seed,))

    def state_dict(self) -> StateDict:
        """Return the state of each rank's collector."""
        return {"ranks": self.env.call("state_dict", ())}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state of each rank's collector."""
        self.env.call("load_state_dict", *[(rank_state,) for rank_state in state["ranks"]])

    def _joined_batch(self, batches: Sequence[EnvBatch]) -> EnvBatch:
        """Join the rollouts of ranks, which have a row per epoch and environment of the rank."""
        rows, steps = [], []
        for batch, envs in zip(batches, self.env.slices, strict=True):
            row, step = batch.final_at
            epoch, env = row // (envs.stop - envs.start), row % (envs.stop - envs.start)
            rows.append(epoch * self.env.num_envs + envs.start + env)
            steps.append(step)
        columns: dict[str, Any] = {
            name: self._columns([getattr(batch, name) for batch in batches])
            for name in ("actions", "token_level_scores", "terminated", "truncated", "valid", "starts", "state")
        }
        names = list(batches[0].obs.keys())
        obs = TensorDict(
            {name: self._columns([batch.obs[name] for batch in batches]) for name in names},
            batch_size=[self.epochs * self.env.num_envs, batches[0].obs.batch_size[1]],
        )
        return EnvBatch(
            obs=obs,
            **columns,
            final_obs=_stacked([batch.final_obs for batch in batches]),
            final_at=(torch.cat(rows), torch.cat(steps)),
            episodes=tuple(episode for batch in batches for episode in batch.episodes),
        )

    def _columns(self, columns: Sequence[Tensor]) -> Tensor:
        """Join columns [E * n, ...] of the n environments of each rank to [E * N, ...]."""
        return torch.cat([column.unflatten(0, (self.epochs, -1)) for column in columns], dim=1).flatten(0, 1)


def _stacked(observations: Sequence[TensorDict]) -> TensorDict:
    stacked = torch.cat(list(observations))
    assert isinstance(stacked, TensorDict)
    return stacked


def _bounds(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the range of rows of each rank, as (start, end)."""
    return list(pairwise([rows * rank // ranks for rank in range(ranks + 1)]))


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None
