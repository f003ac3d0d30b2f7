"""Contradictions in runs that Megatron trains; rules that depend on the model are checked once its config is read."""

from __future__ import annotations

from functools import reduce
from typing import Any

from tether.config.devices import PATH, device_count, devices_of, misplaced, uses_megatron
from tether.config.keys import show
from tether.config.kl import full_kl_setting, has_reference, reference_is_policy, reference_runs_with_actor
from tether.config.problems import Problem
from tether.config.rules.shapes import Condition, Rule
from tether.config.schema.root import RunConfig

ACTOR = "actor_rollout_ref.actor"
SIZES = f"{ACTOR}.megatron"
ONE_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
)  # fmt: skip
MODELS = {ACTOR: "actor", "actor_rollout_ref.ref": "reference", "critic": "critic"}
ONE = "models on the same devices share a layout"
EDGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def same_engine(role: str, when: Condition) -> Rule:
    """All models of a run must use the same engine, because they share devices."""

    def rule(cfg: RunConfig) -> Problem | None:
        mine, actors = _at(cfg, f"{role}.strategy"), cfg.actor_rollout_ref.actor.strategy
        if device_count(cfg) == 1 or not when(cfg) or (mine == "megatron") == (actors == "megatron"):
            return None
        what = f"{mine} contradicts {ACTOR}.strategy={actors}: all models of a run have one engine"
        return Problem(f"{role}.strategy", what, f"leave {role}.strategy out")

    return rule


def same_layout(role: str, when: Condition) -> Rule:
    """Models in one process must have the same layout, because Megatron has one set of process groups per process."""

    def rule(cfg: RunConfig) -> Problem | None:
        if not uses_megatron(cfg) or not when(cfg) or misplaced(cfg) or _has_separate_devices(cfg, role):
            return None
        for name in ONE_LAYOUT:
            mine, actors = (_at(cfg, f"{section}.megatron.{name}") for section in (role, ACTOR))
            if mine != actors:
                what = f"{show(mine)} contradicts {SIZES}.{name}={show(actors)}: {ONE}"
                return Problem(f"{role}.megatron.{name}", what, f"leave {role}.megatron.{name} out")
        for name in EDGES:
            mine, actors = (_at(cfg, f"{section}.megatron.override_transformer_config") for section in (role, ACTOR))
            if mine.get(name) != actors.get(name):
                key = f"{role}.megatron.override_transformer_config"
                what = f"its {name} contradicts that of {SIZES}.override_transformer_config: {ONE}"
                return Problem(key, what, f"leave {name} out of {key}")
        return None

    return rule


def sizes_divide_devices(cfg: RunConfig) -> Problem | None:
    """The product of the parallel sizes must divide the number of devices; the quotient is the data-parallel size."""
    if cfg.actor_rollout_ref.actor.strategy != "megatron" or misplaced(cfg):
        return None
    separate_roles = [role for role, when in ROLES if when(cfg) and _has_separate_devices(cfg, role)]
    return next(filter(None, (_undivided(cfg, role) for role in (ACTOR, *separate_roles))), None)


def _undivided(cfg: RunConfig, role: str) -> Problem | None:
    sizes, devices, key = _at(cfg, f"{role}.megatron"), len(devices_of(cfg, MODELS[role])), f"{role}.megatron"
    split = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.context_parallel_size
    each = reduce(int.__mul__, split)
    fix = f"choose sizes whose product divides {devices}, or another number of devices"
    key_of_devices = PATH if cfg.cluster.component_placement else "trainer.n_gpus_per_node x trainer.nnodes"
    where = f"the {devices} devices ({key_of_devices})"
    if devices % each:
        tensor, pipeline, context = split
        what = (
            f"tensor {tensor} x pipeline {pipeline} ({key}.pipeline_model_parallel_size) x context {context} "
            f"({key}.context_parallel_size) = {each} does not divide {where}"
        )
        return Problem(f"{key}.tensor_model_parallel_size", what, fix)
    expert, ranks = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or split[0]
    if expert > 1 and devices % (expert * ranks * split[1]):
        what = (
            f"expert {expert} x expert tensor {ranks} ({key}.expert_tensor_parallel_size) x pipeline {split[1]} "
            f"({key}.pipeline_model_parallel_size) = {expert * ranks * split[1]} does not divide {where}"
        )
        return Problem(f"{key}.expert_model_parallel_size", what, fix)
    return None


def pieces_have_a_pipeline(cfg: RunConfig) -> Problem | None:
    """Virtual pipeline stages require a pipeline of several devices."""
    sizes = cfg.actor_rollout_ref.actor.megatron
    stages = sizes.virtual_pipeline_model_parallel_size or 1
    if not uses_megatron(cfg) or stages == 1 or sizes.pipeline_model_parallel_size > 1:
        return None
    key, what = (
        f"{SIZES}.virtual_pipeline_model_parallel_size",
        f"{stages} virtual stages need a pipeline of several devices",
    )
    fix = f"leave {key} out, or set {SIZES}.pipeline_model_parallel_size to 2 or more"
    return Problem(key, f"{what} ({SIZES}.pipeline_model_parallel_size)", fix)


def weights_of_megatron(role: str, when: Condition) -> Rule:
    """Only Megatron's ranks can read such weights, and the directory must be set."""

    def rule(cfg: RunConfig) -> Problem | None:
        sizes, actors = _at(cfg, f"{role}.megatron"), cfg.actor_rollout_ref.actor.megatron
        mine = sizes.use_dist_checkpointing, sizes.dist_checkpointing_path
        theirs = actors.use_dist_checkpointing, actors.dist_checkpointing_path
        if not mine[0] or not when(cfg) or (role == REFERENCE and mine == theirs):
            return None
        key, path = f"{role}.megatron.use_dist_checkpointing", f"{role}.megatron.dist_checkpointing_path"
        if role == REFERENCE and reference_is_policy(cfg):
            what = "True reads weights for a reference that is the policy without adapter (model.lora_rank)"
            return Problem(key, what, f"leave {key} out")
        if mine[1] is None:
            return Problem(key, f"True reads weights from {path}, which is null", "set it to the directory")
        if uses_megatron(cfg):
            return None
        strategy = cfg.actor_rollout_ref.actor.strategy
        alone = "one device (trainer.n_gpus_per_node x trainer.nnodes), which trains without Megatron"
        what = f"{ACTOR}.strategy={strategy}" if strategy != "megatron" else alone
        fix = f"leave {key} out to read model.path, or train with strategy=megatron on several devices"
        return Problem(key, f"True has Megatron's ranks read weights, and there are none: {what}", fix)

    return rule


def reference_is_not_beside_the_policy(cfg: RunConfig) -> Problem | None:
    """The KL over the vocabulary runs both models on each micro-batch, but a pipeline can only run one at a time."""
    if not uses_megatron(cfg) or not reference_runs_with_actor(cfg):
        return None
    key, kind = full_kl_setting(cfg)
    what = f"{kind} runs the reference beside the policy, which a pipeline ({ACTOR}.strategy=megatron) cannot"
    return Problem(key, what, "set it to low_var_kl, or another estimator from sampled tokens")


def _has_separate_devices(cfg: RunConfig, role: str) -> bool:
    """Whether a model runs on other devices than the actor."""
    return devices_of(cfg, MODELS[role]) != devices_of(cfg, MODELS[ACTOR])


def _at(cfg: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg)


def _has_critic(cfg: RunConfig) -> bool:
    return cfg.critic.enable


REFERENCE = "actor_rollout_ref.ref"
ROLES: tuple[tuple[str, Condition], ...] = ((REFERENCE, has_reference), ("critic", _has_critic))
MEGATRON_RULES: tuple[Rule, ...] = (
    *(rule(role, when) for role, when in ROLES for rule in (same_engine, same_layout)),
    *(weights_of_megatron(role, when) for role, when in ((ACTOR, lambda cfg: True), *ROLES)),
    sizes_divide_devices,
    pieces_have_a_pipeline,
    reference_is_not_beside_the_policy,
)
