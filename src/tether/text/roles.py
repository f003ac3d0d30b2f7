"""Builds policy, critic, reference and sampler of a text run, in this process or sharded over several devices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tether.batch import TrainBatch
from tether.config import (
    RunConfig,
    local_references,
    models_of,
    placed,
    reference_is_policy,
    reference_models,
    reference_runs_with_actor,
    uses_megatron,
)
from tether.config.schema import CriticConfig, ShardConfig, TrainedFsdpConfig
from tether.distributed import Group
from tether.distributed.groups import RankGroups
from tether.distributed.handles import Replicas
from tether.distributed.worker import this_process
from tether.integrations import integration
from tether.loop.engine import Learner
from tether.runtime.global_rng import seed_rng
from tether.runtime.profiling import ProcessTrace
from tether.text.learning.build import (
    PolicyEngine,
    Reference,
    Role,
    ValueEngine,
    actor_engine,
    build_actor,
    build_critic,
    build_reference,
    critic_engine,
    load_policy,
    load_references,
    load_value_model,
    reference_engine,
    reference_ranks,
    replays,
    sequence_ranks,
)
from tether.text.learning.engines.copies import with_weights
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.engines.one_rank import OneRankEngine
from tether.text.learning.losses import PolicyOutputs, ReferenceModel, ValueOutputs
from tether.text.learning.packing import MicroBatching, balanced, in_order
from tether.text.learning.served_teacher import build_served_teachers
from tether.text.loading import DTYPES
from tether.text.models.expert_choice import follow_choice
from tether.text.models.layers import use_tether_attention
from tether.text.models.lazy_weights import has_lazy_weights
from tether.text.rewards.build import SCORER, reward_engine
from tether.text.sampling.config import SERVERS, RolloutConfig
from tether.text.sampling.engine import NativeEngine, eos_token_ids
from tether.text.sampling.protocol import RolloutEngine, SamplingParams
from tether.text.servers.build import PolicyInfo, SamplingRanks, build_servers
from tether.text.sharded import ShardedEngine, ShardedSampler
from tether.text.sources import ModelSpecs, RankSampler


@dataclass(frozen=True)
class Roles:
    """The models of a run."""

    actor: Learner[TrainBatch, PolicyOutputs]
    critic: Learner[TrainBatch, ValueOutputs] | None
    """The critic; None if the advantage estimator needs no values."""
    reference: Reference | None
    """The reference; None if no KL needs one."""
    sampler: RolloutEngine


@dataclass(frozen=True)
class Engines:
    """The engines of a process, or handles of them; None for models that the process does not have."""

    actor: PolicyEngine | None = None
    critic: ValueEngine | None = None
    references: Mapping[str, PolicyEngine] = field(default_factory=dict)
    """The engine of the reference, or those of several teachers in their order."""
    sampler: NativeEngine | None = None
    policy_info: PolicyInfo | None = None
    """Describes the policy to servers; None if no server samples."""

    def by_name(self) -> dict[str, Any]:
        """Return the engines that exist, as components of a rank."""
        single = {name: engine for name, engine in vars(self).items() if engine is not None and name != "references"}
        return single | dict(self.references)


def build_policy_engine(config: RunConfig, model_specs: ModelSpecs, groups: RankGroups | None) -> PolicyEngine:
    """Load only the policy on the devices of a run; the arguments are those of `build_roles`.

    Raises:
        ValueError: the model cannot be loaded or trained.
    """
    if groups is None:
        engine = _engines(config, model_specs, lambda _: LocalEngine, frozenset({"actor"}), sharded=False).actor
        assert engine is not None
        return engine
    groups.build(build_rank_components, config, model_specs)
    assign = balanced if config.trainer.balance_batch else in_order
    return ShardedEngine(groups.of["actor"], "actor", _replicas(config, groups)["actor"], assign)


def build_roles(
    config: RunConfig,
    model_specs: ModelSpecs,
    sampling: SamplingParams,
    logs: Path,
    resources: ExitStack,
    groups: RankGroups | None,
) -> Roles:
    """Load the models on the devices of a run.

    Args:
        config: configuration of the run.
        model_specs: locations of its models.
        sampling: sampling parameters of training responses.
        logs: folder for the output of other processes.
        resources: closes the servers.
        groups: processes of several devices, which also load the reward model; None: a single device.

    Raises:
        ValueError: a model cannot be loaded or trained.
    """
    if groups is None:
        engines = _engines(config, model_specs, lambda _: LocalEngine, frozenset(models_of(config)), sharded=False)
        sampler: RolloutEngine | None = engines.sampler
        if engines.policy_info is not None:
            sampler = _build_server_sampler(
                config, engines.actor, engines.policy_info, model_specs, sampling, logs, resources, None
            )
        assert sampler is not None
        return _roles(config, engines, sampler, model_specs.total_steps)
    groups.build(build_rank_components, config, model_specs)
    assign = balanced if config.trainer.balance_batch else in_order
    separate = groups.of.get("sampler", groups.of["actor"]) is not groups.of["actor"]
    hosts = _hosts(config, groups)
    # Whether sampling runs while the actor is trained.
    ahead = (separate or hosts is not None) and config.trainer.async_mode != "off"
    handles: dict[str, Any] = {
        component: ShardedEngine[Any](groups.of[name], component, replicas, assign, copies=ahead and name == "actor")
        for name, replicas in _replicas(config, groups).items()
        for component in (local_references(config) if name == "reference" else (name,))
    }
    references = {name: handles.pop(name) for name in local_references(config) if name in handles}
    engines = Engines(**handles, references=references)
    if config.actor_rollout_ref.rollout.name in SERVERS:
        policy_info = _call_first_rank(groups.of["actor"], "policy_info", "read")
        return _roles(
            config,
            engines,
            _build_server_sampler(config, engines.actor, policy_info, model_specs, sampling, logs, resources, hosts),
            model_specs.total_steps,
        )
    ranks = groups.of["sampler"]
    stop_token_ids = _call_first_rank(ranks, "sampler", "stop_token_ids")
    context = _call_first_rank(ranks, "sampler", "context")
    on_ranks = ShardedSampler(ranks, "sampler", stop_token_ids, context, config.actor_rollout_ref.rollout.max_num_seqs)
    if separate:
        assert engines.actor is not None
        on_ranks.load_weights(engines.actor.export())
    return _roles(config, engines, on_ranks, model_specs.total_steps)


def _call_first_rank(group: Group, component: str, method: str) -> Any:
    return group.call(component, method, [(), *[None] * (group.size - 1)])[0]


def _replicas(config: RunConfig, groups: RankGroups) -> dict[str, Replicas]:
    """Return for each model which ranks share their rows."""
    ranks_per_replica = {"actor": sequence_ranks(config, config.actor_rollout_ref.actor)}
    if "critic" in groups.of:
        ranks_per_replica["critic"] = sequence_ranks(config, config.critic)
    if "reference" in groups.of:
        ranks_per_replica["reference"] = reference_ranks(config)
    if uses_megatron(config):
        return {name: Replicas.reported_by(groups.of[name], name) for name in ranks_per_replica}
    return {name: Replicas.contiguous(groups.of[name].size, each) for name, each in ranks_per_replica.items()}


def _build_server_sampler(
    config: RunConfig,
    actor: Any,
    policy_info: PolicyInfo,
    model_specs: ModelSpecs,
    sampling: SamplingParams,
    logs: Path,
    resources: ExitStack,
    hosts: SamplingRanks | None,
) -> RolloutEngine:
    """Return the sampler that uses servers."""
    learner, settings = build_actor(config, actor, model_specs.total_steps), config.actor_rollout_ref
    return build_servers(settings, config.trainer, learner, policy_info, model_specs, sampling, logs, resources, hosts)


def _hosts(config: RunConfig, groups: RankGroups) -> SamplingRanks | None:
    """Return the ranks on whose nodes servers start; None if the run starts servers on this machine, or starts none."""
    rollout, devices = config.actor_rollout_ref.rollout, placed(config)
    if rollout.name not in SERVERS or rollout.server_urls:
        return None
    if "sampler" in devices:
        others = [ranks for model, ranks in devices.items() if model != "sampler"]
        return SamplingRanks(groups.all_ranks, devices["sampler"], train=devices["sampler"] in others)
    here = this_process().machine
    if config.trainer.nnodes > 1 or any(process.machine != here for process in groups.all_ranks.processes):
        return SamplingRanks(groups.all_ranks, range(config.trainer.devices), train=True)
    return None


def build_rank_components(config: RunConfig, model_specs: ModelSpecs, names: frozenset[str]) -> dict[str, Any]:
    """Build the components of one rank with the named models; called on each rank."""
    fsdp = importlib.import_module("tether.text.learning.engines.fsdp")
    seed_rng(config.trainer.seed)
    if config.actor_rollout_ref.rollout.name in SERVERS:
        names -= {"sampler"}  # servers sample on the devices of these ranks
    single_device = _uses_single_device(config, names)

    def make(role: Role) -> Any:
        if single_device:
            return OneRankEngine
        settings = _sharding_of(role)
        options: dict[str, Any] = {
            "sequence": sequence_ranks(config, role),
            "shards": settings.fsdp_size,
            "reshard": settings.reshard_after_forward,
            "on_host": settings.offload_policy,
            "offload_weights": settings.param_offload,
        }
        if isinstance(settings, TrainedFsdpConfig):
            narrow = settings.mixed_precision.reduce_dtype == "bfloat16"
            options["reduce_dtype"] = torch.bfloat16 if narrow else None
            options["offload_optimizer"] = settings.optimizer_offload
        return partial(fsdp.FsdpEngine, sharding=fsdp.Sharding(**options))

    if uses_megatron(config):
        models = integration("megatron", "build").build_megatron_components(config, model_specs, names)
    else:
        models = _engines(config, model_specs, make, names, sharded=not single_device).by_name()
    if "sampler" in models:
        models["sampler"] = RankSampler(models["sampler"], models.get("actor"))
    components = models | {"trace": ProcessTrace()}
    if SCORER in names:
        components[SCORER] = reward_engine(config.reward_model, model_specs.device, make(config.reward_model.model))
    return components


def _uses_single_device(config: RunConfig, names: frozenset[str]) -> bool:
    """Whether these models use a single device without offloading, so that nothing is sharded."""
    sections: dict[str, Role] = {
        "actor": config.actor_rollout_ref.actor,
        "critic": config.critic,
        "reference": config.actor_rollout_ref.ref,
        SCORER: config.reward_model.model,
    }
    settings = [_sharding_of(sections[name]) for name in names & sections.keys()]
    moved = [each.offload_policy or each.param_offload for each in settings]
    moved += [each.optimizer_offload for each in settings if isinstance(each, TrainedFsdpConfig)]
    devices = placed(config)
    return not any(moved) and all(len(devices[name]) == 1 for name in names)


def _sharding_of(role: Role) -> ShardConfig:
    return role.model.fsdp_config if isinstance(role, CriticConfig) else role.fsdp_config


def _engines(
    config: RunConfig, model_specs: ModelSpecs, make: Callable[[Role], Any], names: frozenset[str], *, sharded: bool
) -> Engines:
    """Build the named models. The sampler shares the weights of a `LocalEngine`; with sharded engines it has a copy."""
    tokenizer, steps, incidents = model_specs.tokenizer, model_specs.total_steps, model_specs.incidents
    settings = config.actor_rollout_ref
    engines, policy, references = Engines(), None, dict[str, ReferenceModel]()
    if names & {"actor", "sampler"}:
        lazy_weights = sharded or "actor" not in names  # the sampler receives its weights from the actor
        policy = load_policy(
            settings.model,
            model_specs.model_path,
            model_specs.device,
            model_specs.checkpoint,
            seed=config.trainer.seed,
            lazy_weights=lazy_weights,
        )
        if replays(config):
            follow_choice(policy)
    if "reference" in names or ("actor" in names and reference_runs_with_actor(config)):
        references = load_references(
            config, model_specs.reference_paths, policy, model_specs.device, lazy_weights=sharded
        )
    if "actor" in names:
        assert policy is not None
        models = [reference.model for reference in references.values()]
        reference = replace(next(iter(references.values())), other_models=tuple(models[1:])) if models else None
        engines = _policy_engines(config, policy, reference, model_specs, make, names, sharded=sharded)
    elif "sampler" in names:
        assert policy is not None
        engines = Engines(
            sampler=_build_native_engine(settings.rollout, _copy_to_sample(settings.actor.fsdp_config.dtype, policy))
        )
    if "critic" in names:
        critic = load_value_model(
            config.critic.model,
            model_specs.critic_path,
            model_specs.device,
            model_specs.checkpoint,
            seed=config.trainer.seed,
            lazy_weights=sharded,
        )
        built = critic_engine(config, critic, tokenizer, steps, incidents, make(config.critic))
        engines = replace(engines, critic=built)
    if "reference" in names:
        make_reference = make(config.actor_rollout_ref.ref)
        if sharded and reference_is_policy(config):
            make_reference = partial(_frozen_reference, engines.actor)
        elif reference_runs_with_actor(config):  # not sharded, because the actor's forward passes use it
            make_reference = LocalEngine
        frozen = {name: reference_engine(config, model, make_reference) for name, model in references.items()}
        engines = replace(engines, references=frozen)
    return engines


def _frozen_reference(actor: Any, model: PreTrainedModel, micro: MicroBatching, inference_context: Any) -> Any:
    """Return the reference of a sharded policy with an adapter: the policy itself, with its adapter disabled."""
    return actor.frozen(micro, inference_context)


def _policy_engines(
    config: RunConfig,
    policy: PreTrainedModel,
    reference: ReferenceModel | None,
    model_specs: ModelSpecs,
    make: Callable[[Role], Any],
    names: frozenset[str],
    *,
    sharded: bool,
) -> Engines:
    """Build the actor, and the sampler or, for servers, the facts about the policy."""
    settings, served = config.actor_rollout_ref, config.actor_rollout_ref.rollout.name in SERVERS
    separate = sharded or config.trainer.async_mode != "off"  # the sampler does not share the trained weights
    sampling = _copy_to_sample(settings.actor.fsdp_config.dtype, policy) if separate and "sampler" in names else policy
    policy_info = PolicyInfo.of(policy) if served else None  # must be made before the policy is sharded
    # Built before the sampler, which then shares the weights in their training dtype.
    actor = actor_engine(
        config,
        policy,
        reference,
        model_specs.tokenizer,
        model_specs.total_steps,
        model_specs.incidents,
        make(settings.actor),
    )
    if "sampler" not in names:
        use_tether_attention(policy)  # for training; the native engine enables it by itself
        return Engines(actor=actor, policy_info=policy_info)
    return Engines(actor=actor, sampler=_build_native_engine(settings.rollout, sampling), policy_info=policy_info)


def _build_native_engine(rollout: RolloutConfig, model: PreTrainedModel) -> NativeEngine:
    return NativeEngine(
        model,
        eos_token_ids=eos_token_ids(model),
        max_num_seqs=rollout.max_num_seqs,
        max_kept_tokens=rollout.multi_turn.max_kept_tokens,
        dtype=DTYPES[rollout.dtype],
    )


def _copy_to_sample(compute_dtype: str, policy: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the policy in its training dtype; weights that were not loaded are uninitialized memory.

    Buffers keep their dtype: rotary frequencies in bfloat16 would change the angles of distant tokens.
    """
    dtype, lazy_weights = DTYPES[compute_dtype], has_lazy_weights(policy)

    def copied(weight: torch.Tensor) -> torch.Tensor:
        room = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        return room if lazy_weights else room.copy_(weight.detach())

    return with_weights(policy, map(copied, policy.parameters())).requires_grad_(False)


def _roles(config: RunConfig, engines: Engines, sampler: RolloutEngine, total_steps: int) -> Roles:
    assert engines.actor is not None
    references: dict[str, Any] = {**engines.references, **build_served_teachers(config)}
    scoring = [references[name] for name in reference_models(config) if name in references]
    return Roles(
        build_actor(config, engines.actor, total_steps),
        build_critic(config, engines.critic) if engines.critic is not None else None,
        build_reference(config.actor_rollout_ref, scoring) if scoring else None,
        sampler,
    )
