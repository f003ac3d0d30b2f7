"""Stand for the environments and the policy of control on many ranks; see `tether.execution.handles`."""

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
from tether.envs import ContinuousActions, DiscreteActions, EnvState
from tether.execution.handles import EngineHandle
from tether.execution.worker import Group
from tether.models.control import Act
from tether.observations import ObsLayout
from tether.training import Forward, LossSpec, Updated, UpdatePlan
from tether.training.control import RolloutOutputs, Samples, dealt
from tether.types import StateDict


class ShardedFlatEngine(EngineHandle):
    """Stands for the `FlatRankEngine` of each rank; for the arguments see `EngineHandle`."""

    def infer(self, batch: EnvBatch, forward: Forward[Any, RolloutOutputs]) -> RolloutOutputs:
        """See `tether.training.protocol.Engine.infer`; each rank gets rows of the rollout."""
        parts = [batch.select_rows(range(*bounds)) for bounds in _bounds(len(batch.actions), self._group.size)]
        answers: list[RolloutOutputs] = self._call("infer", [(part, forward) for part, _ in parts])
        last = _joined([answer.bootstrap_values for answer in answers])
        if last is not None:
            last = last[torch.cat([finals for _, finals in parts]).argsort()]
        return RolloutOutputs(
            torch.cat([answer.log_probs for answer in answers]),
            torch.cat([answer.seen for answer in answers]),
            _joined([answer.values for answer in answers]),
            last,
        )

    def update(self, batch: Samples, loss: LossSpec[Any, Any], plan: UpdatePlan, step: int) -> Updated[RolloutOutputs]:
        """See `tether.training.protocol.Engine.update`; observations go to one rank each, other columns to all."""
        shares = dealt(batch, self._group.size)
        asked = [(rows, seen, loss, plan, step) for rows, seen in shares]
        updated: Updated[RolloutOutputs] = self._call("learn", asked)[0]
        self.version += 1
        return updated

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        """See `tether.training.protocol.Engine.saving`; the first rank writes, which has all weights."""
        others = [None] * (self._group.size - 1)
        self._call("begin_saving", [(folder, state), *others])
        return partial(self._until_written, [(), *others])


class ShardedEnvs:
    """Stands for the environments of all ranks, one after the other; they are stepped there. See `VectorEnv`.

    Args:
        group: the ranks.
        part: what the `RankEnvs` are called there.
    """

    def __init__(self, group: Group, part: str) -> None:
        self._group, self._part = group, part
        known: list[tuple[str, int, ObsLayout, ContinuousActions | DiscreteActions]] = self.ask("describe", ())
        self.id, _, self.layout, self.actions = known[0]
        self.counts = [count for _, count, _, _ in known]
        self.num_envs = sum(self.counts)

    @property
    def slices(self) -> list[slice]:
        """The environments of each rank."""
        return [slice(*bounds) for bounds in pairwise([0, *accumulate(self.counts)])]

    def ask(self, method: str, *arguments: tuple[object, ...]) -> list[Any]:
        """The answers of all ranks.

        Args:
            method: of `RankEnvs`.
            arguments: of each rank; or of all alike, where there is one of them.
        """
        given = list(arguments) if len(arguments) > 1 else list(arguments) * self._group.size
        return self._group.call(self._part, method, given)

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        states: list[EnvState] = self.ask("get_state", ())
        left_out = dict.fromkeys(reason for state in states for reason in state.left_out)
        return EnvState([state.data for state in states], tuple(left_out))

    def set_state(self, data: Any) -> None:
        """See `VectorEnv.set_state`."""
        refused = next(filter(None, self.ask("set_state", *[(each,) for each in data])), None)
        if refused:
            raise ValueError(refused)

    def close(self) -> None:
        """See `VectorEnv.close`: they end with their ranks."""


class ShardedCollector:
    """Stands for the `EnvCollector` of each rank.

    Args:
        envs: the environments.
        steps: T.
        chunk: K.
        epochs: E.
    """

    def __init__(self, envs: ShardedEnvs, steps: int, *, chunk: int, epochs: int) -> None:
        self.env, self.steps, self.chunk, self.epochs = envs, steps, chunk, epochs
        self.env_seconds = 0.0
        self.nbytes = sum(envs.ask("nbytes", ()))

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        """See `EnvCollector.noise_shape`."""
        return self.epochs, self.steps // self.chunk, self.env.num_envs

    def collect(self, act: Act, noise: Tensor, seeds: Sequence[int] = ()) -> EnvBatch:
        """See `EnvCollector.collect`; each rank acts with its own copy of the policy that `act` is of.

        What ranks warn of, a simulator that was replaced for example, is warned of here.
        """
        arguments = [(noise[:, :, envs].clone(), list(seeds)) for envs in self.env.slices]  # or all would travel
        answers = self.env.ask("collect", *arguments)
        self.env_seconds += max(seconds for _, seconds, _ in answers)
        for message in dict.fromkeys(message for _, _, messages in answers for message in messages):
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return self._together([batch for batch, _, _ in answers])

    def restart(self, seed: int) -> None:
        """See `EnvCollector.restart`."""
        self.env.ask("restart", (seed,))

    def state_dict(self) -> StateDict:
        """See `EnvCollector.state_dict`."""
        return {"ranks": self.env.ask("state_dict", ())}

    def load_state_dict(self, state: StateDict) -> None:
        """See `EnvCollector.load_state_dict`."""
        self.env.ask("load_state_dict", *[(each,) for each in state["ranks"]])

    def _together(self, parts: Sequence[EnvBatch]) -> EnvBatch:
        """The rollout of all environments; each part has a row for each of its own in each epoch."""
        rows, steps = [], []
        for part, envs in zip(parts, self.env.slices, strict=True):
            row, step = part.final_at
            epoch, env = row // (envs.stop - envs.start), row % (envs.stop - envs.start)
            rows.append(epoch * self.env.num_envs + envs.start + env)
            steps.append(step)
        columns: dict[str, Any] = {
            name: self._columns([getattr(part, name) for part in parts])
            for name in ("actions", "token_level_scores", "terminated", "truncated", "valid", "starts", "state")
        }
        names = list(parts[0].obs.keys())
        obs = TensorDict(
            {name: self._columns([part.obs[name] for part in parts]) for name in names},
            batch_size=[self.epochs * self.env.num_envs, parts[0].obs.batch_size[1]],
        )
        return EnvBatch(
            obs=obs,
            **columns,
            final_obs=_stacked([part.final_obs for part in parts]),
            final_at=(torch.cat(rows), torch.cat(steps)),
            episodes=tuple(episode for part in parts for episode in part.episodes),
        )

    def _columns(self, parts: Sequence[Tensor]) -> Tensor:
        """[E * n, ...] of the environments of each rank -> [E * N, ...]."""
        return torch.cat([part.unflatten(0, (self.epochs, -1)) for part in parts], dim=1).flatten(0, 1)


def _stacked(parts: Sequence[TensorDict]) -> TensorDict:
    stacked = torch.cat(list(parts))
    assert isinstance(stacked, TensorDict)
    return stacked


def _bounds(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Of each rank the first of its rows and the one after the last."""
    return list(pairwise([rows * rank // ranks for rank in range(ranks + 1)]))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
