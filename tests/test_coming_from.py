"""The pages for users of other libraries: their arguments and our keys exist, and the command knows both."""

import re
from dataclasses import fields
from pathlib import Path

from tether.config.keys import keys
from tether.config.loading.foreign_words import KEYS
from tether.config.loading.typos import nearest
from tether.config.support.verl_keys import unread_keys

DOCS = Path(__file__).parent.parent / "docs/guides"
TRL = {
    "GRPOTrainer, LoraConfig": """
        model reward_funcs args train_dataset eval_dataset processing_class peft_config r lora_alpha target_modules
        lora_dropout
    """,
    "GRPOConfig": """
        learning_rate model_init_kwargs trust_remote_code num_generations num_generations_eval max_completion_length
        shuffle_dataset generation_batch_size steps_per_generation temperature top_p top_k min_p chat_template_kwargs
        repetition_penalty use_vllm beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
        sapo_temperature_pos importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
        loss_type mask_truncated_completions sync_ref_model top_entropy_quantile entropy_coef
        vllm_importance_sampling_correction vllm_importance_sampling_clip_max log_completions vllm_mode
        vllm_server_base_url vllm_gpu_memory_utilization vllm_tensor_parallel_size max_prompt_length
    """,
    "TrainingArguments": "",
}
"""Table of the page -> arguments of TRL 1.16.0, of those classes; its config inherits from TrainingArguments."""
SB3 = {
    "PPO, learn": """
        policy env learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf
        normalize_advantage ent_coef vf_coef max_grad_norm use_sde sde_sample_freq target_kl tensorboard_log seed device
        total_timesteps log_interval
    """,
    "`policy_kwargs`": "net_arch activation_fn ortho_init log_std_init features_extractor_class lstm_hidden_size",
    "`make_vec_env`, wrappers": """
        n_envs info_keywords seed wrapper_class env_kwargs vec_env_cls n_stack norm_obs norm_obs_keys norm_reward
        clip_obs clip_reward
    """,
    "callbacks, `evaluate_policy`": """
        n_eval_episodes eval_freq save_freq save_path best_model_save_path reward_threshold
    """,
}
"""Table of the page -> arguments of Stable-Baselines3 2.9.2 and sb3-contrib 2.9.2."""
OPENRLHF = {
    "models and data": """
        pretrain critic_pretrain reward_pretrain remote_rm_url prompt_data eval_dataset input_key label_key max_samples
        prompt_max_len generate_max_len lora_rank lora_alpha target_modules gradient_checkpointing packing_samples
        agent_func_path input_template apply_chat_template load_in_4bit lora_dropout
    """,
    "batches": """
        rollout_batch_size n_samples_per_prompt micro_train_batch_size micro_rollout_batch_size max_epochs num_episodes
        use_dynamic_batch train_max_tokens_per_gpu rollout_max_tokens_per_gpu train_batch_size
    """,
    "algorithm": """
        advantage_estimator lambd gamma eps_clip eps_clip_low_high dual_clip value_clip init_kl_coef kl_target
        kl_horizon kl_estimator use_kl_loss policy_loss_type entropy_loss_coef no_advantage_std_norm normalize_reward
        overlong_buffer_len overlong_penalty_factor dynamic_filtering enable_vllm_is_correction
        vllm_is_truncated_threshold freezing_actor_steps ptx_coef reward_clip_range aux_loss_coef
    """,
    "optimizer, devices, the run": """
        actor_learning_rate critic_learning_rate lr_scheduler lr_warmup_ratio adam_betas l2 max_norm zero_stage
        adam_offload ring_attn_size vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_enable_sleep async_train
        async_queue_size eval_n_samples_per_prompt eval_temperature eval_steps save_steps max_ckpt_num load_checkpoint
        ckpt_path save_path use_wandb wandb_project wandb_run_name seed enable_ema vllm_num_engines colocate_all_models
        actor_num_nodes actor_num_gpus_per_node
    """,
}
"""Table of the page -> arguments of openrlhf.cli.train_ppo_ray, as of its flat names."""
PAGES = {"coming-from-trl.md": TRL, "coming-from-sb3.md": SB3, "coming-from-openrlhf.md": OPENRLHF}


def rows(page: str) -> list[tuple[str, str, list[str]]]:
    """(table, their argument, our keys), in the order of the page."""
    found, table = [], ""
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        if cells[1] == "tether":
            table = cells[0]
        else:
            found.append((table, cells[0].strip("`"), re.findall(r"`([^`]+)`", cells[1])))
    return found


ROWS = [(page, *row) for page in PAGES for row in rows(page)]


def arguments(page: str, table: str) -> set[str]:
    from transformers import TrainingArguments

    inherited = {field.name for field in fields(TrainingArguments)} if page == "coming-from-trl.md" else set()
    return {*PAGES[page][table].split(), *inherited}


def faults(page: str, table: str, argument: str, ours: list[str]) -> list[str]:
    """What is wrong in a row, a sentence each."""
    wrong = [f"{key} is no key" for key in ours if key not in keys() and key not in unread_keys()]
    if argument not in arguments(page, table):
        wrong.append("there is no such argument")
    meant = KEYS.get(argument) or (nearest(argument),)
    if not set(meant) & set(ours):
        wrong.append(f"as a key it is answered with {meant}, and the page says {ours}")
    return [f"{page}, {table}, {argument}: {fault}" for fault in wrong]


def test_each_row_leads_from_a_real_argument_to_a_real_key():
    assert [fault for row in ROWS for fault in faults(*row)] == []
    assert len(faults("coming-from-trl.md", "GRPOConfig", "no_such_argument", ["algorithm.gama"])) == 3


def test_the_pages_have_all_of_it():
    assert {table for _, table, _, _ in ROWS} == {*TRL, *SB3, *OPENRLHF}
    assert len(ROWS) > 80
    for page, tables in PAGES.items():
        text = (DOCS / page).read_text()
        silent = [name for names in tables.values() for name in names.split() if f"`{name}`" not in text]
        assert set(silent) <= {"args", "ortho_init"}, silent
