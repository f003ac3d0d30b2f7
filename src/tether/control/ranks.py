"""A control run on several devices: each rank steps its share of the environments and learns from its share of rows.

Every rank has all weights. The observation of a row is on one rank, which runs the networks on it; all other fields
are on every rank. The networks' outputs for a mini-batch are gathered before the loss, so that denominators, selection
of elements and metrics equal those of a single process. Only the gradients of the weights are summed over ranks, in a
different order than in a single process.

`FlatRankEngine` and `RankEnvs` are on each rank. `ShardedFlatEngine`, `ShardedEnvs` and `ShardedCollector` are their
handles in the trainer's process, as in `tether.text.sharded`. `build_components_on_ranks` builds both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from tether.batch import EnvBatch
from tether.config import RunConfig
from tether.control.build import (
    ControlComponents,
    incidents_folder,
    make_env,
    observation_fields,
    policy_of,
    reset_policy_fields,
)
from tether.control.build_policies import env_for_policy
from tether.control.collecting.collector import EnvCollector
from tether.control.envs.config import TrainEnvConfig
from tether.control.envs.protocol import ActionSpec, EnvState, VectorEnv
from tether.control.learning.flat import SMALLER, FlatEngine
from tether.control.learning.losses import ControlLoss, Draws, RolloutOutputs, Samples, shard_by_rank
from tether.control.policies.mlp_policy import Policy
from tether.control.policies.networks import Act
from tether.control.policies.spec import Observations
from tether.distributed.groups import RankGroups, build_groups
from tether.distributed.handles import EngineHandle
from tether.distributed.worker import Group
from tether.keyed_random import seed_of
from tether.loop.engine import (
    AnyLoss,
    Forward,
    LossSpec,
    MicroBatchTooLarge,
    OutOfMemory,
    UpdatePlan,
    UpdateResult,
    explain_out_of_memory,
)
from tether.loop.rank_exchange import BackgroundWriter, gather_objects
from tether.observations import ObsLayout
from tether.runtime.global_rng import rng_state, seed_rng, set_rng_state
from tether.runtime.machine import resolve_device
from tether.runtime.objects import is_object
from tether.runtime.profiling import ProcessTrace
from tether.runtime.threads import usable_cores
from tether.types import StateDict

if TYPE_CHECKING:
    from tether.control.envs.spaces import Spaces

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
Result = TypeVar("Result")


ENGINE, ENVS = "actor", "envs"
"""Names of the components on each rank."""


def build_components_on_ranks(
    config: RunConfig, checkpoint: Path | None, total_steps: int, logs: Path, resources: ExitStack
) -> tuple[ControlComponents, RankGroups]:
    """Build the components on all ranks; the policy in this process has the same weights, for evaluation.

    Raises:
        ValueError: as in `build_groups` and `make_env`, or the configuration refers to an object of this process,
            which ranks cannot import.
    """
    policy_config, id = config.policy, config.env.train.id
    named = {"env.train.id": id, "policy.model_type": policy_config.model_type}
    for key, value in (named | {"policy.features_extractor": policy_config.features_extractor}).items():
        if is_object(value):
            raise ValueError(f"{key}: an object of this process is on no other device. Name it as FILE.py:NAME")
    groups = build_groups(config, resolve_device(config.trainer.device), logs, resources)
    assert groups is not None
    groups.build(build_control_parts, config, checkpoint, total_steps)
    group, train = groups.of[ENGINE], config.env.train
    env: Any = ShardedEnvs(group, ENVS)
    policy = policy_of(config, checkpoint, env)
    engine: Any = ShardedFlatEngine(group, ENGINE)
    engine.export().copy_to(policy)  # initialisation on a different processor may differ in some bits
    collector: Any = ShardedCollector(
        env, train.max_steps_per_rollout_epoch, chunk=policy_config.num_action_chunks, epochs=train.rollout_epoch
    )
    return ControlComponents(env, policy, engine, collector), groups


def build_control_parts(
    config: RunConfig, checkpoint: Path | None, total_steps: int, names: frozenset[str]
) -> dict[str, Any]:
    """Build the components of this rank; called on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Environments may use the global generators, so they are seeded differently on each rank.
    seed_rng(seed_of(config.trainer.seed, 0, "rank", rank))
    train, first = rank_environments(config.env.train, rank, ranks, config.trainer.n_gpus_per_node)
    env = make_env(
        train, "env.train", reset_policy_fields(train, config.policy), observation_fields(train), first=first
    )
    policy = policy_of(config, checkpoint, env)
    optim, values = config.actor_rollout_ref.actor.optim, config.critic.optim
    engine = FlatRankEngine.from_config(policy, optim, values, total_steps, incidents_folder(config))
    collector = EnvCollector.from_config(
        env_for_policy(env, policy), policy.state_width, train, config.policy, config.algorithm
    )
    return {ENGINE: engine, ENVS: RankEnvs(env, collector, policy), "trace": ProcessTrace()}


def rank_environments(train: TrainEnvConfig, rank: int, ranks: int, on_node: int) -> tuple[TrainEnvConfig, int]:
    """Return ``env.train`` for a rank's share of the environments, in complete groups, and the index of its first."""
    groups = train.total_num_envs // train.group_size
    first, end = (groups * number // ranks * train.group_size for number in (rank, rank + 1))
    workers = (train.num_workers // ranks) if train.num_workers else usable_cores() // on_node
    changed = {"total_num_envs": end - first, "num_workers": max(1, workers)}
    return train.model_copy(update=changed), first


class FlatRankEngine(FlatEngine):
    """The engine on one rank, with the arguments of `FlatEngine`.

    `learn` is called on all ranks; arguments other than the observations are the same. The initial weights are
    broadcast from rank 0.
    """

    _seen: Observations
    """Observations of the rows of this rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._writing = BackgroundWriter()
        dist.broadcast(self._flat.values, 0)
        self._flat.finish_update()
        for buffer in self.policy.buffers():
            dist.broadcast(buffer, 0)

    def learn(self, rows: Samples, seen: Observations, loss: AnyLoss, plan: UpdatePlan, step: int) -> UpdateResult[Any]:
        """Update the policy as `Engine.update` describes.

        Args:
            rows: rows of the rollout; instead of its observation, each has the index of the observation in `seen`, or
                -1 if it is on another rank.
            seen: the observations of this rank's rows.
            loss: the loss to minimise.
            plan: epochs and mini-batches.
            step: the training step.
        """
        self._seen = seen.to(self._device)
        return self.update(rows, loss, plan, step)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights on the CPU; every rank has them."""
        return ((name, value.detach().cpu()) for name, value in self.export().tensors)

    def begin_saving(self, folder: Path, state: Path | None) -> None:
        """Start writing the policy and its optimizer's state in a thread; they are the same on all ranks."""
        self._writing.begin(self.saving(folder, state, copy=True))

    def writing(self) -> tuple[bool, BaseException | None]:
        return self._writing.answer()

    def load_state(self, file: Path) -> int:  # type: ignore[override]
        super().load_state(file)
        return self.version

    def _retry_if_out_of_memory(self, attempt: Callable[[], Result], rows: int) -> Result:
        limit = self.policy.micro_batch or rows
        try:
            with explain_out_of_memory(f"a forward or backward pass with {MICRO_BATCH}={limit}", SMALLER):
                return attempt()
        except OutOfMemory as error:
            if limit <= 1:
                raise
            raise MicroBatchTooLarge(str(error), (MICRO_BATCH, limit // 2)) from None

    def _preallocated(self, mini: Samples, loss: ControlLoss) -> None:
        return None  # outputs are gathered between the forward and backward pass, which it does not support

    def _select_local(self, rows: Samples) -> Samples:
        indices, is_local = rows.obs, self._local_rows(rows)
        return replace(rows[is_local], obs=self._seen[indices[is_local]])

    def _gather_values(self, rows: Samples, values: Tensor) -> Tensor:
        is_local = self._local_decisions(rows)
        gathered = values.new_zeros(len(is_local), *values.shape[1:])
        gathered[is_local] = values
        dist.all_reduce(gathered)  # the other ranks have zeros there
        return gathered

    def _local_values(self, rows: Samples, values: Tensor) -> Tensor:
        is_local = self._local_decisions(rows)
        return values[is_local] if len(values) == len(is_local) else values

    def _finish_gradients(self) -> None:
        dist.all_reduce(self._flat.grads)

    def _global_norm(self, matrix: Tensor) -> Tensor:
        square = matrix.square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def _keep_incident(self, step: int, loss: ControlLoss, mini: Samples, draws: Draws) -> None:
        shares = gather_objects((self._local_rows(mini).cpu(), self._select_local(mini).obs.cpu()))
        if dist.get_rank() > 0:
            return
        order = torch.cat([is_local.nonzero().squeeze(1) for is_local, _ in shares]).argsort()
        obs = torch.cat([seen for _, seen in shares])[order].to(self._device)
        super()._keep_incident(step, loss, replace(mini, obs=obs), draws)

    def _local_rows(self, rows: Samples) -> Tensor:
        """Return a mask [rows] of the rows whose observations are on this rank."""
        assert isinstance(rows.obs, Tensor)
        return rows.obs >= 0

    def _local_decisions(self, rows: Samples) -> Tensor:
        """Return a mask [decisions] of the decisions whose observations are on this rank."""
        is_local = self._local_rows(rows)
        return (
            is_local if rows.memory is None else is_local[:, None].expand_as(rows.memory.selected)[rows.memory.selected]
        )


class RankEnvs:
    """The rank's side of `ShardedCollector` and `ShardedEnvs`.

    Args:
        env: the environments of this rank, without wrappers.
        collector: collects steps of these environments, possibly through a wrapper.
        policy: the policy that acts, which the rank's engine trains.
    """

    def __init__(self, env: VectorEnv, collector: EnvCollector, policy: Policy) -> None:
        self._env, self._collector, self._policy = env, collector, policy

    def describe(self) -> tuple[str, int, ObsLayout, ActionSpec, Spaces]:
        """Return id, number, observation layout, actions and spaces of the environments."""
        return self._env.id, self._env.num_envs, self._env.layout, self._env.actions, self._env.spaces

    def nbytes(self) -> int:
        """Return `EnvCollector.nbytes`."""
        return self._collector.nbytes

    def collect(self, noise: Tensor, seeds: Sequence[int]) -> tuple[EnvBatch, float, list[str]]:
        """Run `EnvCollector.collect`; also return the seconds spent in environments and the warnings that were
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
        """Return the result of `VectorEnv.get_state`, with the state of this process's global random generators."""
        state = self._env.get_state()
        return replace(state, data=(rng_state(), state.data))

    def set_state(self, data: tuple[StateDict, object]) -> str | None:
        """Run `VectorEnv.set_state`; return the error message if the state does not fit."""
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


class ShardedFlatEngine(EngineHandle):
    """Handle of the `FlatRankEngine` on each rank, with the arguments of `EngineHandle`."""

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

    def update(
        self, batch: Samples, loss: LossSpec[Any, Any], plan: UpdatePlan, step: int
    ) -> UpdateResult[RolloutOutputs]:
        # Each observation is sent to one rank, other columns to all.
        shares = shard_by_rank(batch, self._group.size)
        arguments = [(rows, seen, loss, plan, step) for rows, seen in shares]
        updated: UpdateResult[RolloutOutputs] = self._call("learn", arguments)[0]
        self.version += 1
        return updated

    def saving(self, folder: Path, state: Path | None, *, copy: bool) -> Callable[[], None]:
        # Every rank has all weights; the first one writes them.
        others = [None] * (self._group.size - 1)
        self._call("begin_saving", [(folder, state), *others])
        return partial(self._wait_until_written, [(), *others])


class ShardedEnvs:
    """The environments of all ranks as one `VectorEnv`, in the order of ranks."""

    def __init__(self, group: Group, component: str) -> None:
        self._group, self._component = group, component
        descriptions: list[tuple[str, int, ObsLayout, ActionSpec, Spaces]] = self.call("describe", ())
        self.id, _, self.layout, self.actions, self.spaces = descriptions[0]
        self.counts = [description[1] for description in descriptions]
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
        """Do nothing: environments are closed with their ranks."""


class ShardedCollector:
    """Handle of the `EnvCollector` on each rank.

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
        # Cloned, because sending a view would send the noise of all ranks.
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
        return {"ranks": self.env.call("state_dict", ())}

    def load_state_dict(self, state: StateDict) -> None:
        self.env.call("load_state_dict", *[(rank_state,) for rank_state in state["ranks"]])

    def _joined_batch(self, batches: Sequence[EnvBatch]) -> EnvBatch:
        """Join the rollouts of all ranks; each has one row per epoch and environment of the rank."""
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
        if seeds := [batch.seeds for batch in batches if batch.seeds is not None]:
            columns["seeds"] = self._columns(seeds)
        if any(batch.success is not None for batch in batches):  # some ranks may not have reported it yet
            columns["success"] = self._columns(
                [torch.zeros_like(batch.valid) if batch.success is None else batch.success for batch in batches]
            )
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
