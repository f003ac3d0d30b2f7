"""Rows of text runs (`runner.task_type: reasoning`): language models with a separate critic.

The conversion functions return the value of the native key, or UNSET.
"""

from __future__ import annotations

from typing import Any

from tether.integrations.rlinf.megatron import ITS_OWN, MEGATRON, losses_of_critic, megatron_model
from tether.integrations.rlinf.older_names import OLDER_TEXT, SERVER
from tether.integrations.rlinf.other_rows import OTHER_ROWS, OTHER_RULES
from tether.integrations.rlinf.other_runs import ONLY_TEXT, OTHERS
from tether.integrations.rlinf.rows import (
    LOSSES,
    NO_PRECISION,
    UNSET,
    Checked,
    Convert,
    Mapped,
    NoEffect,
    Refused,
    Table,
    Unsupported,
    Values,
    adapter_rank,
    betas,
    min_lr_ratio,
    only,
    path,
    positive_int,
    precision,
    same,
    to,
    unless_null,
)
from tether.integrations.rlinf.schedule import fsdp_schedule, read_by, updates_of_text
from tether.integrations.rlinf.shared import ACTOR, FORMATS, MEMORY, NAME, SHARDS, SHARED
from tether.integrations.rlinf.text_sizes import (
    first_rows,
    micro_batch,
    mini_batch,
    prompts_per_step,
    response_length,
    responses,
)

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
FILTER_GROUPS = "algorithm.filter_groups"
UNCHANGED_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
UNSCALED = NoEffect("number formats here need no gradient scaling")
READ_AT_RESUME = NoEffect("a resumed run has the schedule of its configuration")
PROBED = NoEffect("servers are compared with the trainer by actor_rollout_ref.rollout.parity_freq")
READ_AT_START = NoEffect("prompts are read and tokenized once, at the start")
SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
ESTIMATORS = {"gae": "gae", "grpo": "grpo", "reinpp": "reinforce_plus_plus", "raw": "raw"}
TOKENS = "a text run scores responses and clips tokens"


def estimator(value: object, values: Values) -> object:
    """Return the advantage estimator; REINFORCE++ has a flag that selects its variant with a baseline."""
    if value not in ESTIMATORS:
        raise Unsupported(f"this estimator has no counterpart (supported: {', '.join(ESTIMATORS)})")
    baseline = value == "reinpp" and values.get("algorithm.use_reinpp_baseline")
    return "reinforce_plus_plus_baseline" if baseline else ESTIMATORS[value]


def bootstrap(value: object, values: Values) -> object:
    """Return true, because with "standard" a response that the length limit cuts off is a truncated episode."""
    if value != "standard":
        raise Unsupported("there is no state after the end of a response")
    return True


def loss(value: object, values: Values) -> object:
    """Return the policy loss; actor and critic are separate models, so a joint loss has the same gradients."""
    if value not in LOSSES:
        raise Unsupported(f"this loss has no counterpart (supported: {', '.join(LOSSES)})")
    if value != "actor" and not values.get("critic.use_critic_model"):
        raise Unsupported("a value head on the policy is not supported; set critic.use_critic_model=True")
    return LOSSES[value]


def entropy(value: Any, values: Values) -> object:
    """Return the entropy coefficient, which algorithm.calculate_entropy must not contradict."""
    if value and values.get("algorithm.calculate_entropy") is False:
        raise Unsupported("it contradicts algorithm.calculate_entropy=False")
    return float(value)


def critic(value: object, values: Values) -> object:
    """Return whether there is a separate critic."""
    if not value and values.get("algorithm.adv_type", "gae") == "gae":
        raise Unsupported("algorithm.adv_type=gae needs values, and a value head on the policy is not supported")
    return value


def whitening(value: object, values: Values) -> object:
    """Return whether advantages are normalised, which is optional only for gae."""
    return value if values.get("algorithm.adv_type", "gae") == "gae" else UNSET


def several(value: Any, values: Values) -> object:
    """Return the maximum number of batches that are sampled for a step; UNSET for 1, the step's own."""
    return value if value > 1 else UNSET


def answer_key(value: object, values: Values) -> object:
    """Return the column of answers; UNSET for the column of verl's layout."""
    return UNSET if value in (None, "reward_model.ground_truth") else value


def scale(value: object, values: Values) -> object:
    """Return the score of a right answer; a wrong answer must score its negative."""
    factor = values.get("reward.reward_scale")
    right, wrong = values.get("reward.reward_max_val", 1.0), values.get("reward.reward_min_val", -1.0)
    if wrong != -right:
        blamed = "reward.reward_min_val" if "reward.reward_min_val" in values else "reward.reward_max_val"
        raise Unsupported(
            f"answers score {right} and {wrong}, here 1 and -1 times reward_scale; others are scored by a function, "
            "custom_reward_function.path",
            blamed,
        )
    if factor is None and right == 1:
        return UNSET
    return (1.0 if factor is None else factor) * right


def no_limit(value: Any, values: Values) -> object:
    """Return top-k; -1 if RLinf disables it: by 0, a negative number, or one larger than any vocabulary."""
    return -1 if value <= 0 or value >= 1_000_000 else value


def first_policy_step(value: object, values: Values) -> object:
    """Return the first step that updates the policy (`trainer.critic_warmup`); RLinf counts the steps before it."""
    return value + 1 if isinstance(value, int) and value > 0 else value


def as_it_is(value: object, values: Values) -> object:
    """Return a template that leaves prompts unchanged, if no chat template is applied."""
    return UNSET if value else UNCHANGED_TEMPLATE


def model_format(section: str) -> Convert:
    """Return the conversion of the model's dtype; UNSET if FSDP computes in a dtype of its own."""

    def convert(value: object, values: Values) -> object:
        mixed = values.get(f"{section}.fsdp_config.mixed_precision.param_dtype")
        return precision(value, values) if mixed in NO_PRECISION else UNSET

    return convert


def above_zero(value: object, values: Values) -> object:
    """Return the value, or UNSET for 0, which disables it."""
    return value or UNSET


def recomputes(section: str) -> Convert:
    """Return the conversion to gradient checkpointing: Megatron and FSDP have separate keys, one of which is enough."""

    def convert(value: object, values: Values) -> object:
        granularity = values.get(f"{section}.model.recompute_granularity")
        return bool(granularity or values.get(f"{section}.fsdp_config.gradient_checkpointing"))

    return convert


def decay_length(section: str) -> Convert:
    """Return the conversion of the decay's length from optimizer to training steps; UNSET if it is the full run."""

    def convert(value: object, values: Values) -> object:
        schedule = f"{section}.lr_sched"
        steps = positive_int(values, f"{schedule}.lr_decay_iters", None)
        constant = values.get(f"{schedule}.lr_decay_style", "constant") == "constant"
        if steps is None or constant or steps == values.get("runner.max_steps"):
            return UNSET
        if values.get(f"{schedule}.lr_warmup_fraction"):
            raise Unsupported("lr_warmup_fraction is then a share of it, and here of the run; give lr_warmup_iters")
        updates = positive_int(values, "algorithm.n_minibatches", 1)
        if steps % updates:
            raise Unsupported(f"the rate moves once in {updates} optimizer steps (algorithm.n_minibatches)")
        return steps // updates

    return convert


def reads_megatron(section: str) -> Convert:
    """Return the conversion of the path of a Megatron checkpoint to the flag for it; `use_hf_ckpt` contradicts it."""

    def convert(value: object, values: Values) -> object:
        if value is not None and values.get(f"{section}.megatron.use_hf_ckpt"):
            raise Unsupported(f"it contradicts {section}.megatron.use_hf_ckpt=True")
        return UNSET if value is None else True

    return convert


def reward_kl(convert: Convert) -> Convert:
    """Return the conversion of the KL penalty in rewards; refused with the baseline of REINFORCE++, which in RLinf
    leaves the penalty out."""

    def converted(value: Any, values: Values) -> object:
        if value and values.get("algorithm.use_reinpp_baseline"):
            raise Unsupported(
                "with use_reinpp_baseline the baseline there leaves out the penalty, and here it does not"
            )
        return convert(value, values) if value else UNSET

    return converted


def recomputed(value: object, values: Values) -> object:
    """Return whether log-probs are not recomputed; RLinf recomputes them if configured, or to correct for the
    sampler."""
    return not (values.get("algorithm.recompute_logprobs", True) or values.get("algorithm.importance_sampling_fix"))


def _schedules(section: str, native: str) -> Table:
    """Return the rows of learning rate schedules: `lr_sched`, which Megatron reads, and `optim`, which FSDP reads."""
    optim, schedule, rate = f"{section}.optim", f"{section}.lr_sched", f"{native}.optim"

    def megatron(*keys: str, by: Convert = same) -> Mapped:
        return to(*keys, by=read_by("megatron", section, by))

    shapes = only(("constant", "linear", "cosine"), "schedules are constant, linear and cosine")
    fsdp = fsdp_schedule(optim, rate, updates_of_text(section), lambda values: values.get("runner.max_steps"))
    return {
        **{
            key: Mapped({name: read_by("fsdp", section, by) for name, by in row.to.items()})
            for key, row in fsdp.items()
        },
        f"{schedule}.lr": megatron(f"{rate}.lr"),
        f"{schedule}.max_lr": megatron(f"{rate}.lr"),
        f"{schedule}.min_lr": megatron(f"{rate}.min_lr_ratio", by=min_lr_ratio(optim)),
        f"{schedule}.lr_decay_style": megatron(f"{rate}.lr_scheduler_type", by=shapes),
        f"{schedule}.lr_decay_iters": megatron(f"{rate}.lr_decay_steps", by=decay_length(section)),
        f"{schedule}.lr_warmup_fraction": megatron(f"{rate}.lr_warmup_steps_ratio"),
        f"{schedule}.lr_warmup_iters": megatron(f"{rate}.lr_warmup_steps", by=above_zero),
        f"{schedule}.lr_warmup_init": megatron(f"{rate}.lr_warmup_init", by=above_zero),
        f"{schedule}.lr_wsd_*": NoEffect("acts with lr_decay_style: WSD only, which is refused"),
        f"{schedule}.weight_decay_incr_style": Refused("weight decay stays as it is", fine=("constant", None)),
        f"{schedule}.override_opt_param_scheduler": READ_AT_RESUME,
        f"{schedule}.use_checkpoint_opt_param_scheduler": READ_AT_RESUME,
        f"{schedule}.start_weight_decay": megatron(f"{rate}.weight_decay", by=unless_null),
        f"{schedule}.end_weight_decay": megatron(f"{rate}.weight_decay", by=unless_null),
    }


def _learner(section: str, native: str, model: str, fsdp: str) -> Table:
    """Return the rows of a trained model, `actor` or `critic`."""
    optim = f"{section}.optim"
    return {
        **megatron_model(f"{section}.model", native),
        **_schedules(section, native),
        f"{section}.group_name": NAME,
        f"{section}.training_backend": to(f"{native}.strategy", by=only(("fsdp", "megatron"), "no such backend")),
        f"{section}.strategy": SHARDS,
        f"{section}.mcore_gpt": MEGATRON,
        f"{section}.spec_name": MEGATRON,
        f"{section}.megatron.use_hf_ckpt": Checked("weights are Hugging Face's where no megatron_checkpoint is given"),
        f"{section}.megatron.*": MEGATRON,
        f"{section}.offload_*": MEMORY,
        f"{section}.enable_dp_load_balance": SHARDS,
        f"{section}.calculate_flops": NoEffect("throughput is always logged"),
        f"{section}.micro_batch_size": to(f"{native}.ppo_micro_batch_size_per_gpu", by=micro_batch),
        f"{section}.model.precision": to(f"{fsdp}.dtype", by=model_format(section)),
        f"{section}.model.model_path": to(f"{model}.path", by=path),
        f"{section}.model.model_type": ITS_OWN,
        **{f"{section}.model.{size}": to(f"{native}.megatron.{size}", by=unless_null) for size in SIZES},
        f"{section}.model.recompute_granularity": to(f"{model}.enable_gradient_checkpointing", by=recomputes(section)),
        f"{section}.model.virtual_pipeline_model_parallel_size": to(
            f"{native}.megatron.virtual_pipeline_model_parallel_size"
        ),
        f"{section}.model.add_value_head": NoEffect("critic.use_critic_model says whether there is a critic"),
        f"{section}.model.megatron_checkpoint": Mapped(
            {
                f"{native}.megatron.use_dist_checkpointing": reads_megatron(section),
                f"{native}.megatron.dist_checkpointing_path": unless_null,
            }
        ),
        f"{section}.model.sequence_parallel": to(f"{native}.megatron.sequence_parallel"),
        f"{optim}.optimizer": Refused("the optimizer is AdamW", fine=("adam", "adamw")),
        f"{optim}.lr": to(f"{native}.optim.lr"),
        f"{optim}.clip_grad": to(f"{native}.optim.clip_grad"),
        f"{optim}.adam_beta1": to(f"{native}.optim.betas", by=betas(optim)),
        f"{optim}.adam_beta2": to(f"{native}.optim.betas", by=betas(optim)),
        f"{optim}.adam_eps": to(f"{native}.optim.eps"),
        f"{optim}.weight_decay": to(f"{native}.optim.weight_decay"),
        f"{optim}.bf16": NoEffect("weights and optimizer state stay fp32"),
        f"{optim}.fp16": Refused("number formats are bf16 and fp32", fine=(False, None)),
        f"{optim}.use_distributed_optimizer": to(f"{native}.megatron.use_distributed_optimizer"),
        f"{optim}.overlap_*": MEGATRON,
        f"{optim}.optimizer_*": MEMORY,
        f"{optim}.use_precision_aware_optimizer": Refused("optimizer state stays fp32", fine=(False, None)),
        **{f"{optim}.{name}": UNSCALED for name in ("*loss_scale*", "hysteresis")},
        f"{section}.tokenizer.use_fast": NoEffect("tokenizers are always the fast ones"),
        f"{section}.tokenizer.padding_side": NoEffect("follows from the use of the tokens"),
        f"{section}.fsdp_config.mixed_precision.param_dtype": to(f"{fsdp}.dtype", by=precision),
        f"{section}.fsdp_config.mixed_precision.*": SHARDS,
        f"{section}.fsdp_config.gradient_checkpointing": to(
            f"{model}.enable_gradient_checkpointing", by=recomputes(section)
        ),
        f"{section}.fsdp_config.amp_autocast.enabled": FORMATS,
        f"{section}.fsdp_config.*": SHARDS,
    }


TEXT: Table = {
    **OTHERS,
    **SHARED,
    **OLDER_TEXT,
    **ONLY_TEXT,
    **_learner("actor", ACTOR, MODEL, f"{ACTOR}.fsdp_config"),
    **_learner("critic", "critic", "critic.model", "critic.model.fsdp_config"),
    "actor.global_batch_size": to(f"{ACTOR}.ppo_mini_batch_size", by=responses),
    "actor.model.is_lora": to(f"{MODEL}.lora_rank", by=adapter_rank("actor")),
    "actor.model.lora_rank": NoEffect("acts with is_lora only, which gives it"),
    "critic.model.is_lora": to("critic.model.lora_rank", by=adapter_rank("critic")),
    "critic.model.lora_rank": NoEffect("acts with is_lora only, which gives it"),
    "actor.tokenizer.tokenizer_model": to(f"{MODEL}.tokenizer_path", by=path),
    "actor.tokenizer.trust_remote_code": to(f"{MODEL}.trust_remote_code", "data.trust_remote_code"),
    "critic.use_critic_model": Mapped(
        {"critic.enable": critic, "critic.megatron.override_transformer_config": losses_of_critic}
    ),
    "critic.seed": NoEffect("one seed serves everything: actor.seed"),
    "critic.tokenizer.tokenizer_model": NoEffect("the critic reads the policy's tokens"),
    "critic.tokenizer.trust_remote_code": to("critic.model.trust_remote_code"),
    "runner.max_epochs": to("trainer.total_epochs"),
    "runner.max_steps": to("trainer.total_training_steps", by=lambda value, values: UNSET if value < 0 else value),
    "runner.only_eval": to("trainer.val_only"),
    "runner.seq_length": to("data.max_response_length", by=response_length),
    "runner.enable_dynamic_batch_size": to(f"{ACTOR}.use_dynamic_bsz"),
    "runner.max_tokens_per_mbs": to(f"{ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    "algorithm.normalize_advantages": to("algorithm.normalize_advantages", by=whitening),
    "algorithm.group_size": to(f"{ROLLOUT}.n"),
    "algorithm.adv_type": to("algorithm.adv_estimator", by=estimator),
    "algorithm.use_reinpp_baseline": Checked("chooses the variant of algorithm.adv_type=reinpp"),
    "algorithm.loss_type": to(f"{ACTOR}.policy_loss.loss_mode", by=loss),
    "algorithm.loss_agg_func": to(
        f"{ACTOR}.loss_agg_mode",
        by=only(("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"), "no such aggregation"),
    ),
    "algorithm.rollout_micro_batch_size": to(f"{ROLLOUT}.max_num_seqs"),
    "algorithm.logprob_forward_micro_batch_size": to(
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_micro_batch_size_per_gpu",
        "critic.forward_micro_batch_size_per_gpu",
    ),
    "algorithm.entropy_bonus": to(f"{ACTOR}.entropy_coeff", by=entropy),
    "algorithm.calculate_entropy": NoEffect("the entropy is always logged"),
    "algorithm.ratio_clip_eps": to(f"{ACTOR}.clip_ratio"),
    "algorithm.value_cliprange": to("critic.cliprange_value"),
    "algorithm.reward_type": Refused(TOKENS, fine=("action_level",)),
    "algorithm.logprob_type": Refused(TOKENS, fine=("action_level", "token_level")),
    "algorithm.entropy_type": Refused(TOKENS, fine=("action_level", "token_level")),
    "algorithm.bootstrap_type": to("algorithm.bootstrap_truncated", by=bootstrap),
    "algorithm.rollout_epoch": to("data.train_batch_size", by=prompts_per_step),
    "algorithm.n_minibatches": to(f"{ACTOR}.ppo_mini_batch_size", by=mini_batch, default=1),
    "algorithm.training_batch_size_per_gpu": to(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "algorithm.rollout_batch_size_per_gpu": SERVER,
    "algorithm.val_rollout_batch_size_per_gpu": SERVER,
    "algorithm.recompute_logprobs": to(f"{CORRECTION}.bypass_mode", by=recomputed),
    "algorithm.importance_sampling_fix": to(
        f"{CORRECTION}.rollout_is", by=lambda value, values: "token" if value else None
    ),
    "algorithm.importance_sampling_clip": to(f"{CORRECTION}.rollout_is_threshold", by=above_zero),
    "algorithm.critic_warmup_steps": to("trainer.critic_warmup", by=first_policy_step),
    "algorithm.kl_beta": Mapped(
        {f"{ACTOR}.use_kl_loss": lambda value, values: value > 0, f"{ACTOR}.kl_loss_coef": same}
    ),
    "algorithm.kl_penalty_type": to(f"{ACTOR}.kl_loss_type"),
    "algorithm.reinpp_kl_beta": Mapped(
        {
            "algorithm.use_kl_in_reward": reward_kl(lambda value, values: True),
            "algorithm.kl_ctrl.kl_coef": reward_kl(same),
            "algorithm.kl_penalty": reward_kl(lambda value, values: values.get("algorithm.kl_penalty_type", UNSET)),
        }
    ),
    "algorithm.early_stop_imp_ratio": to(f"{ACTOR}.early_stop_imp_ratio"),
    "algorithm.use_valid_token_scale": Refused("micro-batches never change the gradient", fine=(False, None)),
    "algorithm.max_num_gen_batches": Mapped(
        {f"{FILTER_GROUPS}.enable": lambda value, values: value > 1, f"{FILTER_GROUPS}.max_num_gen_batches": several}
    ),
    "algorithm.sampling_params.do_sample": Refused("training needs samples, not greedy answers", fine=(True,)),
    "algorithm.sampling_params.temperature": to(f"{ROLLOUT}.temperature"),
    "algorithm.sampling_params.top_k": to(f"{ROLLOUT}.top_k", by=no_limit),
    "algorithm.sampling_params.top_p": to(f"{ROLLOUT}.top_p"),
    "algorithm.sampling_params.repetition_penalty": Refused(
        "sampling with a repetition penalty is not supported yet", fine=(1, None)
    ),
    "algorithm.sampling_params.max_new_tokens": to("data.max_response_length", by=response_length),
    "algorithm.sampling_params.min_new_tokens": Refused("responses may be as short as one token", fine=(0, 1, None)),
    "rollout.rollout_backend": to(f"{ROLLOUT}.name"),
    "rollout.gpu_memory_utilization": SERVER,
    "rollout.enforce_eager": SERVER,
    "rollout.tensor_parallel_size": SERVER,
    "rollout.pipeline_parallel_size": SERVER,
    "rollout.max_running_requests": to(f"{ROLLOUT}.max_num_seqs"),
    "rollout.model.model_path": to(f"{MODEL}.path", by=path),
    "rollout.model.model_type": ITS_OWN,
    "rollout.model.precision": to(f"{ROLLOUT}.dtype", by=precision),
    "rollout.return_logprobs": NoEffect("the sampler's log-probs are always kept"),
    "rollout.padding": Refused("the tokenizer says which token pads"),
    "rollout.eos": Refused("the model's generation_config.json says which tokens end a response"),
    "rollout.is_eval": Refused("a checkpoint is tested with `tether eval`", fine=(False, None)),
    "rollout.seed": NoEffect("one seed serves everything: actor.seed"),
    "rollout.print_outputs": NoEffect("held-out responses are written to samples.jsonl in the folder of the run"),
    "rollout.validate_weight": PROBED,
    "rollout.validate_save_dir": PROBED,
    "rollout.distributed_executor_backend": SERVER,
    "rollout.disable_log_stats": SERVER,
    "rollout.detokenize": SERVER,
    "rollout.cuda_graph_max_bs": SERVER,
    "rollout.sglang.*": SERVER,
    "rollout.vllm.*": SERVER,
    **OTHER_ROWS,
    **OTHER_RULES,
    "data.type": Refused("text runs take text prompts", fine=("math", "reasoning")),
    "data.data_size": to("data.train_max_samples", "data.val_max_samples", by=first_rows),
    "data.process_workers": READ_AT_START,
    "data.process_batch_size": READ_AT_START,
    "data.prepend_prompt": Refused("prompts are those of the rows", fine=(None, "")),
    "data.dataset_name": NoEffect("files are read by their layout, whatever their name"),
    "data.train_data_paths": to("data.train_files"),
    "data.val_data_paths": to("data.val_files"),
    "data.rollout_batch_size": Mapped(
        {"data.train_batch_size": prompts_per_step, f"{ACTOR}.ppo_mini_batch_size": mini_batch}
    ),
    "data.val_rollout_batch_size": to("data.val_batch_size"),
    "data.max_prompt_length": Mapped({"data.max_prompt_length": same, "data.max_response_length": response_length}),
    "data.filter_prompt_by_length": to("data.filter_overlong_prompts"),
    "data.num_workers": READ_AT_START,
    "data.shuffle": to("data.shuffle"),
    "data.validation_shuffle": NoEffect("every held-out row is scored once, so their order does not matter"),
    "data.seed": to("data.seed"),
    "data.prompt_key": to("data.prompt_key"),
    "data.answer_key": to("data.answer_key", by=answer_key),
    "data.apply_chat_template": to("data.chat_template", by=as_it_is),
    "env.*": NoEffect("text runs have no simulator"),
    "reward.use_reward_model": to(
        "reward_model.enable", by=only((False,), "not supported yet by this key; set reward_model.enable")
    ),
    "reward.reward_type": to(
        "data.data_source", by=only(("math",), "the data_source of a row chooses its rule; without one it is math")
    ),
    "reward.reward_scale": to("reward_model.reward_scale", by=scale),
    "reward.reward_max_val": to("reward_model.reward_scale", by=scale),
    "reward.reward_min_val": to("reward_model.reward_scale", by=scale),
    "reward.use_prompt": Refused("rules read the response and its row, not the prompt", fine=(False, None)),
    "reward.tokenizer.*": NoEffect("rules read text, not tokens"),
}  # fmt: skip
"""All keys of text runs in RLinf's PPO documentation and its PPO recipe."""
