"""Builds policy, reference and critic, each with its engine, loss and update plan."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tether.batch import TrainBatch
from tether.config import (
    ActorRolloutRefConfig,
    RunConfig,
    device_count,
    full_kl_in_loss,
    full_kl_in_reward,
    has_reference,
    local_references,
    reference_is_policy,
    reference_runs_with_actor,
    replay_of,
)
from tether.config.schema import (
    ActorConfig,
    BackboneConfig,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    RefConfig,
)
from tether.loop.engine import Engine, Learner, LossSpec, UpdatePlan
from tether.loop.run import optimizer_options, policy_loss_options, scheduled_loss, selection_options
from tether.loss_requirements import REQUIRED_AGGREGATION
from tether.runtime.install import pip_install
from tether.runtime.objects import is_object, registered_object
from tether.text.data.config import DataConfig
from tether.text.learning.advantages import asks_for
from tether.text.learning.config_distillation import DistillationConfig, read_teachers
from tether.text.learning.engines.local import LocalEngine, scattered
from tether.text.learning.losses import (
    Aggregation,
    CriticLoss,
    Distillation,
    PolicyForward,
    PolicyLoss,
    PolicyOutputs,
    ReferenceModel,
    TokenSelection,
    ValueForward,
    ValueOutputs,
)
from tether.text.learning.off_policy import bypass_options, old_log_probs_from
from tether.text.learning.packing import Experts, MicroBatching
from tether.text.loading import DTYPES, on_device
from tether.text.models.critic import load_critic
from tether.text.models.expert_choice import experts_per_token
from tether.text.models.full_kl import TopK
from tether.text.models.layers import enable_gradient_checkpointing
from tether.text.models.load import load_causal_lm, load_config
from tether.text.models.save import adapter_folder, save_tokenizer, write_model
from tether.text.rewards.config import ScoringModelConfig
from tether.text.sampling.config import RolloutConfig

RECOMPUTED: dict[str, Experts] = {"disabled": "chosen", "R2": "recorded", "R3": "replayed"}
"""Router replay mode -> source of the experts in the pass that computes the old log-probs."""
UPDATED: dict[str, Experts] = {"disabled": "chosen", "R2": "replayed", "R3": "replayed"}
"""Router replay mode -> source of the experts in the update."""


def replays(config: RunConfig) -> bool:
    """Whether the update reuses the experts of an earlier pass."""
    return replay_of(config)[1] != "disabled"


def check_router_replay(config: RunConfig, policy: Path | str) -> None:
    """Refuse router replay for a policy without experts, before it is loaded.

    Raises:
        ValueError: the policy has no experts.
    """
    key, mode = replay_of(config)
    if mode == "disabled":
        return
    trust = config.actor_rollout_ref.model.trust_remote_code
    model_config = (
        registered_object(str(policy)).config if is_object(policy) else load_config(policy, trust_remote_code=trust)
    )
    if experts_per_token(model_config) is None:
        raise ValueError(
            f"{key}={mode}: {type(model_config).__name__} (actor_rollout_ref.model.path) has no experts, so there is "
            f"no choice to replay. Leave {key} out, or take a mixture of experts."
        )


Reference = Callable[[TrainBatch], PolicyOutputs]
PolicyEngine = Engine[TrainBatch, PolicyOutputs]
ValueEngine = Engine[TrainBatch, ValueOutputs]
MakeEngine = Callable[..., Any]
"""Makes a `LocalEngine`, or another engine with the same arguments."""


Role = ActorConfig | CriticConfig | RefConfig | ScoringModelConfig
"""The configuration section of a model."""


def sequence_ranks(config: RunConfig, role: Role) -> int:
    """Return the number of ranks that share each row of tokens."""
    if isinstance(role, ScoringModelConfig) or device_count(config) == 1:
        return 1
    if config.actor_rollout_ref.actor.strategy == "megatron":
        return role.megatron.context_parallel_size
    return role.ulysses_sequence_parallel_size


def reference_ranks(config: RunConfig) -> int:
    """Return the same for the reference, which may share the policy's model; for a full KL every rank has a copy."""
    settings = config.actor_rollout_ref
    if reference_is_policy(config):
        return sequence_ranks(config, settings.actor)
    return 1 if reference_runs_with_actor(config) else sequence_ranks(config, settings.ref)


def micro_batching(
    *, dynamic: bool, rows: int, tokens: int, packed: bool, section: str, kind: str, ranks: int = 1
) -> MicroBatching:
    """Return the micro-batching of `ranks` that split rows; `section` and `kind` are the prefixes of its keys.

    Its limit is in rows, or in tokens with ``use_dynamic_bsz``.
    """
    if dynamic:
        key = f"{section}.{kind}_max_token_len_per_gpu"
        return MicroBatching(max_tokens=tokens * ranks, packed=packed, key=key, ranks=ranks)
    return MicroBatching(max_rows=rows, packed=packed, key=f"{section}.{kind}_micro_batch_size_per_gpu")


def load_policy(
    model_config: ModelConfig,
    path: Path | str,
    device: torch.device,
    checkpoint: Path | None,
    *,
    seed: int,
    lazy_weights: bool = False,
) -> PreTrainedModel:
    """Load the policy to train, from the checkpoint if there is one, and with an adapter if ``lora_rank`` is set.

    `seed` initializes the adapter. With `lazy_weights`, weights stay in files if possible, as in `load_causal_lm`.
    """
    saved = checkpoint / "actor" if checkpoint else None
    source = saved if saved and not model_config.lora_rank else path
    model_class = type(registered_object(str(path))) if is_object(path) else AutoModelForCausalLM
    model = load_causal_lm(
        source,
        dtype=torch.float32,
        trust_remote_code=model_config.trust_remote_code,
        override_config=model_config.override_config,
        auto_class=model_class,
        lazy_device=device if lazy_weights else None,
    )
    return _to_train(on_device(model, device), model_config, "actor_rollout_ref.model", saved, seed)


def _to_train(
    model: PreTrainedModel, config: BackboneConfig, section: str, saved: Path | None, seed: int
) -> PreTrainedModel:
    """Insert the adapter of a policy or critic, if it has one, and configure gradient checkpointing."""
    if config.lora_rank:
        insert_adapter(model, config, section, saved, seed)
    if config.enable_gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def insert_adapter(model: PreTrainedModel, config: BackboneConfig, section: str, saved: Path | None, seed: int) -> None:
    """Insert the adapter of a policy or critic: the one next to its `saved` model, otherwise the configured initial
    one, otherwise a new one.

    Raises:
        ValueError: peft is not installed, a name or pattern matches no layer, or the adapter does not fit the model.
    """
    lora = _lora(f"{section}.lora_rank")
    if saved:
        lora.load_lora(model, adapter_folder(saved))
    elif config.lora_adapter_path is not None:
        lora.load_lora(model, Path(config.lora_adapter_path).expanduser())
    else:
        options = lora.LoraOptions(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            target_modules=lora.names_or_pattern(config.target_modules),
            exclude_modules=lora.names_or_pattern(config.exclude_modules),
        )
        torch.manual_seed(seed)  # peft initializes the adapter with the global generator
        lora.add_lora(model, options)


def _lora(key: str = "actor_rollout_ref.model.lora_rank") -> ModuleType:
    """Import `tether.text.models.lora` on first use, because peft is an extra."""
    try:
        return importlib.import_module("tether.text.models.lora")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}: LoRA needs the package {error.name}, which is not installed. "
            f"Run: {pip_install('lora')}, or leave lora_rank out."
        ) from error


def save_model(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, folder: Path) -> None:
    """Write a plain Hugging Face directory, or this rank's shard of one. A model with an adapter is written merged, for
    use elsewhere, and its adapter separately next to it, for resuming."""
    if hasattr(model, "peft_config"):
        lora = _lora()
        lora.save_merged(model, folder)
        lora.save_adapter(model, adapter_folder(folder))
    else:
        write_model(model, folder)
    save_tokenizer(tokenizer, folder)


def _exported_tokenizer(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the run's chat template, whose variables default to the run's values."""
    kwargs = data.apply_chat_template_kwargs
    if data.chat_template is None and not (kwargs and tokenizer.chat_template):
        return tokenizer
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in kwargs.items()
    )
    exported = copy.deepcopy(tokenizer)
    exported.chat_template = defaults + tokenizer.get_chat_template(data.chat_template)
    return exported


def _set_sampling(model: PreTrainedModel, rollout: RolloutConfig) -> None:
    """Save the sampling settings of training with the policy, in place of those of the initial model."""
    before = model.generation_config
    top_k = rollout.top_k if rollout.top_k > 0 else model.config.get_text_config().vocab_size  # not all support -1 or 0
    if before is not None:
        model.generation_config = GenerationConfig(
            bos_token_id=before.bos_token_id,
            eos_token_id=before.eos_token_id,
            pad_token_id=before.pad_token_id,
            do_sample=True,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=top_k,
        )


def actor_engine(
    config: RunConfig,
    model: PreTrainedModel,
    reference: ReferenceModel | None,
    tokenizer: PreTrainedTokenizerBase,
    total_steps: int,
    incidents: Path,
    make: MakeEngine = LocalEngine,
) -> Any:
    """Build the engine of the policy."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    packed = config.actor_rollout_ref.model.use_remove_padding
    if not config.sft.enable:
        _set_sampling(model, rollout)
    return make(
        model,
        _update_micro(actor, packed, sequence_ranks(config, actor)),
        optimizer_options(actor.optim, total_steps),
        infer_micro=micro_batching(
            dynamic=rollout.log_prob_use_dynamic_bsz,
            rows=rollout.log_prob_micro_batch_size_per_gpu,
            tokens=rollout.log_prob_max_token_len_per_gpu,
            packed=packed,
            section="actor_rollout_ref.rollout",
            kind="log_prob",
            ranks=sequence_ranks(config, actor),
        ),
        compute_dtype=DTYPES[actor.fsdp_config.dtype],
        reference=reference if reference_runs_with_actor(config) else None,
        save=partial(save_model, _exported_tokenizer(tokenizer, config.data)),
        incident_dir=incidents / "actor",
    )


def build_actor(config: RunConfig, engine: PolicyEngine, total_steps: int) -> Learner[TrainBatch, PolicyOutputs]:
    """Build the policy's learner."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    packed = config.actor_rollout_ref.model.use_remove_padding
    return Learner(
        engine,
        PolicyForward(
            rollout.temperature,
            packed,
            with_entropy=True,
            with_sum_pi_squared=asks_for(config.algorithm, "sum_pi_squared"),
            with_full_kl=full_kl_in_reward(config),
            experts=RECOMPUTED[replay_of(config)[1]],
        ),
        _actor_loss(config, actor),
        replace(update_plan(actor, rollout.n, config.trainer.seed), max_ratio=actor.early_stop_imp_ratio),
        loss_at=scheduled_loss(actor, total_steps, partial(_actor_loss, config)),
    )


def _actor_loss(config: RunConfig, actor: ActorConfig) -> LossSpec[TrainBatch, PolicyOutputs]:
    """Return the loss for an `actor` section; that of an update may differ from the configuration's."""
    selection = selection_options(actor)
    return LossSpec(
        PolicyForward(
            config.actor_rollout_ref.rollout.temperature,
            config.actor_rollout_ref.model.use_remove_padding,
            with_entropy=actor.entropy_coeff != 0 or old_log_probs_from(config) != "recomputed",
            with_full_kl=full_kl_in_loss(config),
            forward_kl=_forward_kl(config.distillation),
            experts=UPDATED[replay_of(config)[1]],
        ),
        _policy_loss(config, actor),
        TokenSelection(actor.policy_loss.loss_mode, selection) if selection else None,
    )


def load_references(
    config: RunConfig,
    paths: Mapping[str, Path | str],
    policy: PreTrainedModel | None,
    device: torch.device,
    *,
    lazy_weights: bool = False,
) -> dict[str, ReferenceModel]:
    """Load the teachers, or the initial policy, by name; empty if no KL uses one.

    With LoRA the initial policy is the trained one with its adapter disabled, otherwise it is a separate frozen model.
    """
    settings = config.actor_rollout_ref
    if not has_reference(config):
        return {}
    if reference_is_policy(config):
        assert policy is not None, "both are on the same devices"
        return dict.fromkeys(paths, ReferenceModel(policy, inference_context=_lora().adapter_off))
    load = partial(
        load_causal_lm,
        dtype=DTYPES[settings.ref.fsdp_config.dtype],
        trust_remote_code=settings.model.trust_remote_code,
        override_config=None if config.distillation.enabled else settings.model.override_config,
        lazy_device=device if lazy_weights and not reference_runs_with_actor(config) else None,
    )
    return {name: ReferenceModel(on_device(load(paths[name]), device)) for name in local_references(config)}


def reference_engine(config: RunConfig, reference: ReferenceModel, make: MakeEngine = LocalEngine) -> Any:
    """Build the engine of the reference."""
    settings = config.actor_rollout_ref
    micro = micro_batching(
        dynamic=settings.ref.log_prob_use_dynamic_bsz,
        rows=settings.ref.log_prob_micro_batch_size_per_gpu,
        tokens=settings.ref.log_prob_max_token_len_per_gpu,
        packed=settings.model.use_remove_padding,
        section="actor_rollout_ref.ref",
        kind="log_prob",
        ranks=reference_ranks(config),
    )
    return make(reference.model, micro, inference_context=reference.inference_context)


def build_reference(settings: ActorRolloutRefConfig, engines: Sequence[PolicyEngine]) -> Reference:
    """Return the function that computes the reference's log-probs of sampled tokens; with several teachers, each engine
    computes those of the rows of its teacher."""
    forward = PolicyForward(settings.rollout.temperature, settings.model.use_remove_padding)
    return partial(_infer_by_teacher, engines, forward=forward)


def _infer_by_teacher(engines: Sequence[PolicyEngine], batch: TrainBatch, forward: PolicyForward) -> PolicyOutputs:
    if batch.teacher is None:
        (engine,) = engines
        return engine.infer(batch, forward)
    rows = [(batch.teacher == index).nonzero()[:, 0] for index in range(len(engines))]
    pairs = [(engine, mine) for engine, mine in zip(engines, rows, strict=True) if len(mine)]
    outputs = [engine.infer(batch[mine], forward) for engine, mine in pairs]
    return scattered(outputs, [mine for _, mine in pairs], len(batch))


def load_value_model(
    model_config: CriticModelConfig,
    path: Path | str,
    device: torch.device,
    checkpoint: Path | None,
    *,
    seed: int,
    lazy_weights: bool = False,
) -> PreTrainedModel:
    """Load the critic to train, as `load_policy` loads the policy."""
    saved = checkpoint / "critic" if checkpoint else None
    model = load_critic(
        saved if saved and not model_config.lora_rank else path,
        dtype=torch.float32,
        trust_remote_code=model_config.trust_remote_code,
        override_config=model_config.override_config,
        lazy_device=device if lazy_weights else None,
    )
    return _to_train(on_device(model, device), model_config, "critic.model", saved, seed)


def critic_engine(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    total_steps: int,
    incidents: Path | None,
    make: MakeEngine = LocalEngine,
) -> Any:
    """Build the engine that runs and updates the critic."""
    critic = config.critic
    packed = critic.model.use_remove_padding
    return make(
        model,
        _update_micro(critic, packed, sequence_ranks(config, critic)),
        optimizer_options(critic.optim, total_steps),
        infer_micro=micro_batching(
            dynamic=critic.use_dynamic_bsz,
            rows=critic.forward_micro_batch_size_per_gpu,
            tokens=critic.forward_max_token_len_per_gpu,
            packed=packed,
            section="critic",
            kind="forward",
            ranks=sequence_ranks(config, critic),
        ),
        compute_dtype=DTYPES[critic.model.fsdp_config.dtype],
        save=partial(save_model, tokenizer),
        incident_dir=incidents / "critic" if incidents else None,
    )


def build_critic(config: RunConfig, engine: ValueEngine) -> Learner[TrainBatch, ValueOutputs]:
    """Build the critic's learner."""
    critic = config.critic
    packed = critic.model.use_remove_padding
    aggregation = Aggregation(critic.loss_agg_mode or "token-mean", width=config.data.max_response_length)
    bootstrap = config.algorithm.adv_estimator == "gae" and config.algorithm.bootstrap_truncated
    return Learner(
        engine,
        ValueForward(packed, with_bootstrap=bootstrap),
        LossSpec(ValueForward(packed), CriticLoss(critic.cliprange_value, critic.huber_delta, aggregation)),
        update_plan(critic, config.actor_rollout_ref.rollout.n, config.trainer.seed),
    )


def _forward_kl(distillation: DistillationConfig) -> TopK | None:
    """Return the options of the KL over the teacher's most probable tokens; None if it is not used."""
    options = distillation.distillation_loss
    if not distillation.enabled or options.loss_mode != "forward_kl_topk":
        return None
    return TopK(options.topk, options.log_prob_min_clamp)


def _distillation(distillation: DistillationConfig) -> Distillation | None:
    """Return the loss of distillation; None without a teacher."""
    options = distillation.distillation_loss
    if not distillation.enabled:
        return None
    return Distillation(
        options.loss_mode,
        options.distillation_loss_coef if options.use_task_rewards else None,
        options.loss_max_clamp,
        options.use_policy_gradient,
        options.clip_ratio_low,
        options.clip_ratio_high,
        tuple(read_teachers(distillation.teacher_models)) if len(distillation.teacher_models) > 1 else (),
    )


def _policy_loss(config: RunConfig, actor: ActorConfig) -> PolicyLoss:
    correction, width = config.algorithm.rollout_correction, config.data.max_response_length
    name = "bypass_mode" if correction.bypass_mode else actor.policy_loss.loss_mode
    required, configured = REQUIRED_AGGREGATION.get(name), actor.loss_agg_mode
    aggregation = Aggregation(required or configured or "token-mean", actor.loss_scale_factor, width)
    return PolicyLoss(
        name=name,
        options={**policy_loss_options(actor), **(bypass_options(correction) if correction.bypass_mode else {})},
        aggregation=aggregation,
        penalty_aggregation=replace(aggregation, mode=configured) if required and configured else None,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_kind=actor.kl_loss_type,
        distillation=_distillation(config.distillation),
    )


def _update_micro(role: ActorConfig | CriticConfig, packed: bool, ranks: int) -> MicroBatching:
    return micro_batching(
        dynamic=role.use_dynamic_bsz,
        rows=role.ppo_micro_batch_size_per_gpu,
        tokens=role.ppo_max_token_len_per_gpu,
        packed=packed,
        section="critic" if isinstance(role, CriticConfig) else "actor_rollout_ref.actor",
        kind="ppo",
        ranks=ranks,
    )


def update_plan(role: ActorConfig | CriticConfig, responses: int, seed: int) -> UpdatePlan:
    """Return the epochs and mini-batches of a role, with `responses` per prompt."""
    return UpdatePlan(
        mini_batch_rows=role.ppo_mini_batch_size * responses, epochs=role.ppo_epochs, shuffle=role.shuffle, seed=seed
    )
