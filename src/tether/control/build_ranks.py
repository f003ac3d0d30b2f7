"""Environments and policy of a control run on several devices: each steps its share and learns from its share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tether.config import RunConfig
from tether.config.schema import TrainEnvConfig
from tether.control.build import (
    ControlRoles,
    build_collector,
    flat_engine,
    make_env,
    pacing_of,
    policy_of,
    view_of,
)
from tether.control.build_policies import env_for_policy
from tether.control.collecting.rank_envs import RankEnvs
from tether.control.learning.flat_ranks import FlatRankEngine
from tether.control.sharded import ShardedCollector, ShardedEnvs, ShardedFlatEngine
from tether.distributed.groups import RankGroups, build_groups
from tether.keyed_random import seed_of
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import resolve_device
from tether.runtime.objects import is_object
from tether.runtime.profiling import ProcessTrace
from tether.runtime.threads import usable_cores

ENGINE, ENVS = "actor", "envs"
"""Names of each rank's components."""


def roles_on_ranks(
    config: RunConfig, checkpoint: Path | None, total_steps: int, logs: Path, resources: ExitStack
) -> tuple[ControlRoles, RankGroups]:
    """Build the components on the ranks of a run; the policy in this process has their weights, for evaluation.

    Args:
        config: configuration of the run.
        checkpoint: the checkpoint to resume from.
        total_steps: number of training steps.
        logs: folder for the output of the ranks.
        resources: closes the ranks.

    Raises:
        ValueError: as in `build_groups` and `make_env`, or the ranks would need an object of this process.
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
    engine.export().copy_to(policy)  # a different processor may initialize with different bits
    collector: Any = ShardedCollector(
        env, train.max_steps_per_rollout_epoch, chunk=policy_config.num_action_chunks, epochs=train.rollout_epoch
    )
    return ControlRoles(env, policy, engine, collector), groups


def build_control_parts(
    config: RunConfig, checkpoint: Path | None, total_steps: int, names: frozenset[str]
) -> dict[str, Any]:
    """Build the components of one rank; called on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # The global generators, which environments may use, are seeded differently on each rank.
    seed_rng(seed_of(config.trainer.seed, 0, "rank", rank))
    train, first = environments_of(config.env.train, rank, ranks, config.trainer.n_gpus_per_node)
    env = make_env(train, "env.train", pacing_of(config), view_of(config), first=first)
    policy = policy_of(config, checkpoint, env)
    engine = flat_engine(config, policy, total_steps, FlatRankEngine)
    collector = build_collector(config, env_for_policy(env, policy), policy)
    return {ENGINE: engine, ENVS: RankEnvs(env, collector, policy), "trace": ProcessTrace()}


def environments_of(train: TrainEnvConfig, rank: int, ranks: int, on_node: int) -> tuple[TrainEnvConfig, int]:
    """Return the section of a rank's environments, in complete groups, and the index of the first one.

    Args:
        train: section of all environments.
        rank: index of the rank.
        ranks: number of ranks.
        on_node: number of ranks that share a machine's cores.
    """
    groups = train.total_num_envs // train.group_size
    first, end = (groups * number // ranks * train.group_size for number in (rank, rank + 1))
    workers = (train.num_workers // ranks) if train.num_workers else usable_cores() // on_node
    changed = {"total_num_envs": end - first, "num_workers": max(1, workers)}
    return train.model_copy(update=changed), first
