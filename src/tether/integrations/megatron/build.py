"""Runs with ``strategy=megatron``: checks before a model loads, and the components of a rank."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tether.config import RunConfig, models_of, placed, reference_is_policy
from tether.config.schema import ActorConfig, BackboneConfig, CriticConfig, RefConfig
from tether.distributed.groups import RankGroups
from tether.integrations.megatron import check
from tether.integrations.megatron.layout import FIRST, LAST, check_adapters, layout_of
from tether.integrations.megatron.version import check_version
from tether.runtime.install import pip_install
from tether.runtime.objects import is_object
from tether.text.learning.build import actor_engine, critic_engine, insert_adapter, reference_engine
from tether.text.learning.engines.copies import empty_copy, with_weights
from tether.text.learning.losses import ReferenceModel
from tether.text.loading import DTYPES, on_device
from tether.text.models.empty import empty_model
from tether.text.models.fused_experts import Unfused
from tether.text.models.load import load_config
from tether.text.sampling.config import SERVERS
from tether.text.sampling.engine import NativeEngine, eos_token_ids
from tether.text.servers.build import PolicyInfo
from tether.text.sources import ModelSpecs

Role = ActorConfig | CriticConfig | RefConfig
NOT_MEGATRONS = ("attention_backend", FIRST, LAST)
"""Entries of ``override_transformer_config`` that tether's attention and the layout replace."""


def roles_of(config: RunConfig) -> dict[str, tuple[str, Role]]:
    """Return the models that use Megatron: name -> path of its section, and the section."""
    settings, models = config.actor_rollout_ref, models_of(config)
    sections: dict[str, tuple[str, Role]] = {
        "actor": ("actor_rollout_ref.actor", settings.actor),
        "reference": ("actor_rollout_ref.ref", settings.ref),
        "critic": ("critic", config.critic),
    }
    return {model: section for model, section in sections.items() if model in models}


def overrides_of(config: RunConfig, role: Role) -> dict[str, object]:
    """Return the entries of Megatron's config that a role overrides; gradient checkpointing recomputes layers."""
    configured = role.megatron.override_transformer_config
    overrides = {name: value for name, value in configured.items() if value is not None and name not in NOT_MEGATRONS}
    if "recompute_granularity" not in overrides and _model_of(config, role).enable_gradient_checkpointing:
        overrides["recompute_granularity"] = "full"
    if overrides.get("recompute_granularity") == "full":
        overrides = {"recompute_method": "uniform", "recompute_num_layers": 1} | overrides
    if overrides.get("recompute_granularity") != "selective":
        overrides.pop("recompute_modules", None)  # verl's default lists modules although recomputation is disabled
    return overrides


def megatron_line(config: RunConfig, groups: RankGroups) -> list[str]:
    """Return a line for the user about Megatron, from the actor's first rank."""
    group = groups.of["actor"]
    return [group.call("actor", "described", [(), *[None] * (group.size - 1)])[0]]


def check_megatron(config: RunConfig, policy: Path | str, critic: Path | str, checkpoint: Path | None = None) -> None:
    """Refuse models that Megatron cannot train, before anything is loaded.

    Args:
        config: configuration of the run.
        policy: location of the policy's config.
        critic: location of the critic's config.
        checkpoint: checkpoint of the run from which actor and critic are read, if any.

    Raises:
        ValueError: Megatron is not installed, a model has no mapping or cannot be split by the layout, or the weights
            do not fit the model.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError(
            "actor_rollout_ref.actor.strategy=megatron: needs the package megatron-core, which is not installed. "
            f"Run: {pip_install('megatron')}, or set actor_rollout_ref.actor.strategy=fsdp."
        )
    check_version()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about missing apex and Transformer Engine, which it does not need
        families = importlib.import_module("tether.integrations.megatron.families")
    devices = placed(config)
    paths = {"actor": policy, "reference": policy, "critic": critic}
    for model, (name, role) in roles_of(config).items():
        path, layout = paths[model], layout_of(role.megatron, name)
        if is_object(path):
            raise ValueError(
                "a model that is an object cannot be read by Megatron's ranks, which take slices of safetensors. Save "
                "it once as a directory (model.save_pretrained), or set actor_rollout_ref.actor.strategy=fsdp."
            )
        hf_config = _hf_config(config, role, path)
        prefix = f"{name}.megatron."
        families.check_family(hf_config)
        rank = 0 if model == "reference" else _model_of(config, role).lora_rank
        check_adapters(rank, hf_config, _model_section(role))
        check(layout, hf_config, len(devices[model]), prefix)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about Megatron's defaults; they are in the logs of the ranks
                families.transformer_config(hf_config, layout, DTYPES[_dtype(role)], overrides_of(config, role))
        except (AssertionError, ImportError, TypeError, ValueError) as error:
            key = "override_transformer_config"
            message = str(error) if str(error).startswith(key) else f"{key}: Megatron refuses it: {error}"
            raise ValueError(f"{prefix}{message}") from error
        from_start = checkpoint is None or model == "reference" or rank > 0
        if rank > 0:
            _check_targets(config, role, path, hf_config)
        if role.megatron.use_dist_checkpointing and from_start:
            _check_weights(role, prefix, empty_model(path, hf_config, critic=model == "critic"))


def _check_targets(config: RunConfig, role: Role, path: Path | str, hf_config: PreTrainedConfig) -> None:
    """Compare the linear layers that get a new adapter with those in which Megatron can hold one."""
    is_critic, settings = isinstance(role, CriticConfig), _model_of(config, role)
    if settings.lora_adapter_path is not None:  # its layers are those of the file
        return
    model = empty_model(path, hf_config, critic=is_critic)
    with torch.random.fork_rng(devices=[]):
        insert_adapter(model, settings, _model_section(role), None, config.trainer.seed)
    mapping, adapters = (
        importlib.import_module(f"tether.integrations.megatron.{name}") for name in ("mapping", "adapters")
    )
    weights = mapping.tensor_mappings(hf_config, "critic" if is_critic else "policy")
    adapters.MegatronAdapters.of(model).check(weights)


def _check_weights(role: Role, prefix: str, model: PreTrainedModel) -> None:
    """Check that a Megatron checkpoint has the weights of the model that loads it."""
    kind = "critic" if isinstance(role, CriticConfig) else "policy"
    try:
        _dist_checkpoint(role, model.config).check(model.config, kind, Unfused(model.state_dict()))
    except ValueError as error:
        before = role.megatron.dist_checkpointing_prefix
        or_prefix = f" Or change {prefix}dist_checkpointing_prefix={before}." if before else ""
        raise ValueError(f"{prefix}dist_checkpointing_path={error}{or_prefix}") from error


def _dist_checkpoint(role: Role, hf_config: PreTrainedConfig) -> Any:
    """Open the Megatron checkpoint of a role."""
    kind, sizes = importlib.import_module("tether.integrations.megatron.dist_checkpoint").DistCheckpoint, role.megatron
    folder = Path(sizes.dist_checkpointing_path or "").expanduser()
    return kind(folder, hf_config.vocab_size, sizes.dist_checkpointing_prefix)


def _hf_config(config: RunConfig, role: Role, path: Path | str) -> PreTrainedConfig:
    """Load a role's model config with the run's changes, as the class of transformers that the mapping supports."""
    model = _model_of(config, role)
    trusted, changed = model.trust_remote_code, model.override_config
    return load_config(path, trust_remote_code=trusted, override_config=changed, own_class=True)


def build_megatron_components(config: RunConfig, model_specs: ModelSpecs, names: frozenset[str]) -> dict[str, Any]:
    """Build the components of one rank with the named models; called on each rank."""
    engine = importlib.import_module("tether.integrations.megatron.engine")
    settings, roles = config.actor_rollout_ref, roles_of(config)
    tokenizer, steps, incidents = model_specs.tokenizer, model_specs.total_steps, model_specs.incidents

    def make(model: str, folder: Path, **kwargs: Any) -> Any:
        name, section = roles[model]
        sizes, trained = section.megatron, not isinstance(section, RefConfig)
        options = engine.MegatronOptions(
            layout=layout_of(section.megatron, name),
            overrides=overrides_of(config, section),
            distributed_optimizer=trained and getattr(sizes, "use_distributed_optimizer"),  # noqa: B009
            offload_weights=sizes.param_offload,
            offload_gradients=trained and getattr(sizes, "grad_offload"),  # noqa: B009
            offload_optimizer=trained and getattr(sizes, "optimizer_offload"),  # noqa: B009
        )
        weights: Any = folder
        if sizes.use_dist_checkpointing and (model_specs.checkpoint is None or folder.parent != model_specs.checkpoint):
            weights = _dist_checkpoint(section, _hf_config(config, section, folder))
        return partial(engine.MegatronEngine, weights=weights, device=model_specs.device, options=options, **kwargs)

    start = _folder(model_specs.model_path)
    saved = model_specs.checkpoint / "actor" if model_specs.checkpoint else None
    folder = saved if saved and not settings.model.lora_rank else start
    hf_config = _hf_config(config, settings.actor, folder)
    components: dict[str, Any] = {}
    if "actor" in names:
        policy, adapter = _with_adapter(config, settings.actor, empty_model(folder, hf_config), saved)
        of_actor = make("actor", folder, adapter=adapter)
        actor = actor_engine(config, policy, None, tokenizer, steps, incidents, of_actor)
        components["actor"] = actor
        if settings.rollout.name in SERVERS:
            components["policy_info"] = PolicyInfo.of(policy)
        else:
            components["sampler"] = _sampler(config, policy, model_specs)
    if "critic" in names:
        saved = model_specs.checkpoint / "critic" if model_specs.checkpoint else None
        where = saved if saved and not config.critic.model.lora_rank else _folder(model_specs.critic_path)
        critic = empty_model(where, _hf_config(config, config.critic, where), critic=True)
        critic, adapter = _with_adapter(config, config.critic, critic, saved)
        of_critic = make("critic", where, role="critic", adapter=adapter)
        components["critic"] = critic_engine(config, critic, tokenizer, steps, incidents, of_critic)
    if "reference" in names and reference_is_policy(config):
        twin = lambda model, micro, inference_context: components["actor"].frozen(micro)  # noqa: E731
        components["reference"] = reference_engine(config, ReferenceModel(policy), twin)
    elif "reference" in names:
        dtype = DTYPES[settings.ref.fsdp_config.dtype]
        of_reference = make("reference", start, compute_dtype=dtype)
        alone = lambda model, micro, inference_context: of_reference(model, micro)  # noqa: E731
        components["reference"] = reference_engine(config, ReferenceModel(empty_model(start, hf_config)), alone)
    return components


def _with_adapter(
    config: RunConfig, role: Role, model: PreTrainedModel, saved: Path | None
) -> tuple[PreTrainedModel, dict[str, Tensor] | None]:
    """Return the model with the configured LoRA adapter on the meta device, and the values on the CPU.

    The values are those of the adapter, and of a critic's head if it is saved with the adapter; None without adapter.
    """
    settings = _model_of(config, role)
    if not settings.lora_rank:
        return model, None
    # peft creates an adapter on the device of the weights. Placeholders, which take the memory of one number, make it
    # draw the values on the CPU, as for the other engines.
    adapted = with_weights(model, (torch.zeros(1).expand(p.shape) for p in model.parameters()))
    placeholders = set(adapted.parameters())
    insert_adapter(adapted, settings, _model_section(role), saved, config.trainer.seed)
    values = {name: p.detach() for name, p in adapted.named_parameters() if p not in placeholders}
    return empty_copy(adapted), values


def _model_of(config: RunConfig, role: Role) -> BackboneConfig:
    return config.critic.model if isinstance(role, CriticConfig) else config.actor_rollout_ref.model


def _model_section(role: Role) -> str:
    return "critic.model" if isinstance(role, CriticConfig) else "actor_rollout_ref.model"


def _sampler(config: RunConfig, policy: PreTrainedModel, model_specs: ModelSpecs) -> NativeEngine:
    """Return the native engine with memory for a full copy of the policy, in the training dtype."""
    settings = config.actor_rollout_ref
    dtype = DTYPES[settings.actor.fsdp_config.dtype]
    room = (torch.zeros(p.shape, dtype=dtype, device=model_specs.device) for p in policy.parameters())
    model = with_weights(policy, room)
    return NativeEngine(
        on_device(model, model_specs.device).requires_grad_(False),
        eos_token_ids=eos_token_ids(model),
        max_num_seqs=settings.rollout.max_num_seqs,
        max_kept_tokens=settings.rollout.multi_turn.max_kept_tokens,
        dtype=DTYPES[settings.rollout.dtype],
    )


def _folder(path: Path | str) -> Path:
    """Return the directory of a model, downloading it for a hub id."""
    return path if isinstance(path, Path) else Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))


def _dtype(role: Role) -> str:
    return role.model.fsdp_config.dtype if isinstance(role, CriticConfig) else role.fsdp_config.dtype
