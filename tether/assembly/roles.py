"""Policy, critic, reference and sampler of a text run: in this process, or in shards on several devices."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from tether.assembly.learners import (
    Reference,
    Role,
    actor_engine,
    asks_reference,
    build_actor,
    build_critic,
    build_reference,
    critic_engine,
    load_policy,
    load_reference,
    load_value_model,
    needs_full_kl,
    reference_engine,
    reference_ranks,
    sequence_ranks,
)
from tether.assembly.megatron import megatron_parts, uses_megatron
from tether.assembly.number_formats import DTYPES
from tether.assembly.parts import RankSampler, Sources
from tether.assembly.reward_model import SCORER, asks_reward_model, reward_engine
from tether.assembly.servers import PolicyCard, build_servers
from tether.batch import TrainBatch
from tether.config import RunConfig
from tether.config.schema import SERVERS, CriticConfig, TrainedFsdpConfig
from tether.execution import Group, Replicas, ShardedEngine, ShardedSampler
from tether.models.language.unread import is_unread
from tether.models.layers import use_tether_attention
from tether.rollout import RolloutEngine, SamplingParams
from tether.rollout.native import NativeEngine, eos_token_ids
from tether.runtime.global_rng import seed_rng
from tether.runtime.objects import is_object
from tether.runtime.profiling import ProcessTrace
from tether.training import Learner
from tether.training.division import balanced, in_order
from tether.training.engines.copies import with_weights
from tether.training.engines.local import LocalEngine
from tether.training.text import PolicyOutputs, ValueOutputs


@dataclass(frozen=True)
class Roles:
    """The models of a run."""

    actor: Learner[TrainBatch, PolicyOutputs]
    critic: Learner[TrainBatch, ValueOutputs] | None
    """None where the advantage estimator needs no values."""
    reference: Reference | None
    """None where no KL is estimated from it."""
    sampler: RolloutEngine


def build_roles(
    config: RunConfig,
    sources: Sources,
    sampling: SamplingParams,
    logs: Path,
    resources: ExitStack,
    group: Group | None,
) -> Roles:
    """Load the models on the devices of a run.

    Args:
        config: of the run.
        sources: of its models.
        sampling: how responses are drawn that are trained on.
        logs: folder for what other processes print.
        resources: closes servers.
        group: the processes of several devices; they load the reward model, too.

    Raises:
        ValueError: models that cannot be loaded or trained.
    """
    if group is None:
        engines = _engines(config, sources, lambda _: LocalEngine, sharded=False)
        card = engines.get("card")
        served = card and _served(config, engines["actor"], card, sources, sampling, logs, resources)
        return _roles(config, engines, served or engines["sampler"], sources.total_steps)
    group.build(build_parts, config, sources)
    assign = balanced if config.trainer.balance_batch else in_order
    engines = {
        name: ShardedEngine[Any](group, name, replicas, assign) for name, replicas in _replicas(config, group).items()
    }
    first_rank = [(), *[None] * (group.size - 1)]
    if config.actor_rollout_ref.rollout.name in SERVERS:
        card = group.call("card", "read", first_rank)[0]
        sampler = _served(config, engines["actor"], card, sources, sampling, logs, resources)
    else:
        sampler = ShardedSampler(group, "sampler", group.call("sampler", "ends", first_rank)[0])
    return _roles(config, engines, sampler, sources.total_steps)


def _replicas(config: RunConfig, group: Group) -> dict[str, Replicas]:
    """Of each model, which ranks share its rows."""
    parts = {"actor": sequence_ranks(config, config.actor_rollout_ref.actor)}
    if config.critic.enable:
        parts["critic"] = sequence_ranks(config, config.critic)
    if asks_reference(config):
        parts["reference"] = reference_ranks(config)
    if uses_megatron(config):
        return dict.fromkeys(parts, Replicas.asked(group, "actor"))
    return {name: Replicas.in_a_row(group.size, each) for name, each in parts.items()}


def _served(
    config: RunConfig,
    actor: Any,
    card: PolicyCard,
    sources: Sources,
    sampling: SamplingParams,
    logs: Path,
    resources: ExitStack,
) -> RolloutEngine:
    """The sampler that servers are behind."""
    learner = build_actor(config, actor, sources.total_steps)
    return build_servers(config, learner, card, sources.device, sampling, logs, resources)


def build_parts(config: RunConfig, sources: Sources) -> dict[str, Any]:
    """The parts of one rank; called on each."""
    fsdp = importlib.import_module("tether.training.engines.fsdp")
    seed_rng(config.trainer.seed)

    def make(role: Role) -> Any:
        settings = role.model.fsdp_config if isinstance(role, CriticConfig) else role.fsdp_config
        options: dict[str, Any] = {
            "sequence": sequence_ranks(config, role),
            "shards": settings.fsdp_size,
            "reshard": settings.reshard_after_forward,
            "on_host": settings.offload_policy,
            "weights_rest_on_host": settings.param_offload,
        }
        if isinstance(settings, TrainedFsdpConfig):
            narrow = settings.mixed_precision.reduce_dtype == "bfloat16"
            options["reduce_dtype"] = torch.bfloat16 if narrow else None
            options["optimizer_rests_on_host"] = settings.optimizer_offload
        return partial(fsdp.FsdpEngine, sharding=fsdp.Sharding(**options))

    models = megatron_parts(config, sources) if uses_megatron(config) else _engines(config, sources, make, sharded=True)
    parts = models | {"trace": ProcessTrace()}
    if asks_reward_model(config):
        parts[SCORER] = reward_engine(config, sources.device, make(config.reward_model.model))
    return parts


def _engines(config: RunConfig, sources: Sources, make: Callable[[Role], Any], *, sharded: bool) -> dict[str, Any]:
    """Engines by role, with the sampler: it shares weights with `LocalEngine`, and has a copy beside shards."""
    tokenizer, steps, incidents = sources.tokenizer, sources.total_steps, sources.incidents
    policy = load_policy(config, sources.model_path, sources.device, sources.checkpoint, unread=sharded)
    rollout = config.actor_rollout_ref.rollout
    served = rollout.name in SERVERS
    apart = sharded or config.trainer.async_mode != "off"  # the sampler's weights are not those that training changes
    sampling = _copy_to_sample(config, policy) if apart and not served else policy
    card = PolicyCard.of(policy) if served else None  # while it is whole
    reference = load_reference(config, sources.model_path, policy, sources.device, unread=sharded)
    # Before the sampler, which then finds the weights in the dtype that they are trained in and shares them.
    actor = actor_engine(config, policy, reference, tokenizer, steps, incidents, make(config.actor_rollout_ref.actor))
    parts: dict[str, Any] = {"actor": actor}
    if served:
        parts["card"] = card
        use_tether_attention(policy)  # for training; the native engine sees to it itself
    else:
        native = NativeEngine(
            sampling,
            eos_token_ids=eos_token_ids(sampling),
            max_num_seqs=rollout.max_num_seqs,
            max_kept_tokens=rollout.multi_turn.max_kept_tokens,
            dtype=DTYPES[rollout.dtype],
        )
        parts["sampler"] = RankSampler(native, actor) if sharded else native
    if config.critic.enable:
        critic = load_value_model(config, sources.critic_path, sources.device, unread=sharded)
        parts["critic"] = critic_engine(config, critic, tokenizer, steps, incidents, make(config.critic))
    if reference is not None and asks_reference(config):
        make_reference = make(config.actor_rollout_ref.ref)
        if sharded and reference.model is policy:  # with LoRA
            make_reference = lambda _, micro, during: actor.frozen(micro, during)  # noqa: E731
        elif needs_full_kl(config):  # then it is whole on every rank, as the actor's forward passes need it
            make_reference = LocalEngine
        parts["reference"] = reference_engine(config, reference, make_reference)
    return parts


def _copy_to_sample(config: RunConfig, policy: PreTrainedModel) -> PreTrainedModel:
    """A copy of the policy in the format that it is trained in; of weights that are not read yet, only the room."""
    dtype = DTYPES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    if is_unread(policy):
        room = (torch.empty(p.shape, dtype=dtype, device=p.device) for p in policy.parameters())
        model = with_weights(policy, room)
    else:
        model = copy.deepcopy(policy)
    torch.nn.Module.to(model, dtype)
    return model.requires_grad_(False)


def _roles(config: RunConfig, engines: dict[str, Any], sampler: RolloutEngine, total_steps: int) -> Roles:
    return Roles(
        build_actor(config, engines["actor"], total_steps),
        build_critic(config, engines["critic"]) if "critic" in engines else None,
        build_reference(config, engines["reference"]) if "reference" in engines else None,
        sampler,
    )


def build_group(config: RunConfig, device: torch.device, logs: Path, resources: ExitStack) -> Group | None:
    """The processes of a run, one for each device, which `resources` ends; None where there is one device.

    Raises:
        ValueError: Ray is not installed, or there are too few devices.
    """
    nodes, ranks = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if config.trainer.devices == 1:
        return None
    key = "trainer.n_gpus_per_node" if nodes == 1 else "trainer.nnodes"
    if is_object(config.actor_rollout_ref.model.path):
        raise ValueError(f"{key}: a model that is an object of this process has no other device. Save it first")
    if device.type != "cuda" and config.trainer.device != "cpu":
        raise ValueError(
            f"trainer.n_gpus_per_node={ranks}: this machine has no CUDA device. Set it to 1, or trainer.device=cpu for "
            f"{ranks} processes on its cores"
        )
    options = config.ray_kwargs.ray_init
    group = _start_group(ranks, device.type, config.trainer.num_threads, logs, nodes=nodes, options=options)
    resources.callback(group.close)
    return cast("Group", group)


def _start_group(per_node: int, device: str, threads: int | None, logs: Path, *, nodes: int, options: Any) -> Any:
    """See `tether.execution.ray_group.RayGroup`, which needs an extra."""
    key = "trainer.n_gpus_per_node" if nodes == 1 else "trainer.nnodes"
    try:
        execution = importlib.import_module("tether.execution.ray_group")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}={per_node if nodes == 1 else nodes}: several devices need the package {error.name}, which is not "
            f"installed. Run: pip install 'tether[ray]', or set {key}=1."
        ) from error
    here = torch.cuda.device_count()
    if device == "cuda" and per_node > here and execution.is_local(nodes, options):
        raise ValueError(f"{key}={per_node}: this machine has {here} CUDA devices. Set it to at most {here}")
    return execution.RayGroup(per_node, device, threads, logs, nodes=nodes, options=options)
