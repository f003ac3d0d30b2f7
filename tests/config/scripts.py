"""Keys that the 24 scripts of verl's examples/ppo_trainer set, at verl's commit b178a3cd5: differences from a base.

Data and models lie where the scripts look for them, below the home folder. An empty value takes a setting away.
"""

from collections.abc import Mapping

_GSM8K = ('"~/data/gsm8k/{}.parquet"',)
_GSM8K_AND_MATH = (*_GSM8K, '"~/data/math/{}.parquet"')


def _data(files: tuple[str, ...]) -> dict[str, str]:
    return {
        f"data.{key}_files": "[" + ",".join(file.format(part) for file in files) + "]"
        for key, part in (("train", "train"), ("val", "test"))
    }


def _models(path: str) -> dict[str, str]:
    return {"actor_rollout_ref.model.path": path, "critic.model.path": path}


def _without(settings: Mapping[str, str], *endings: str) -> dict[str, str]:
    return {key: "" for key in settings if key.endswith(endings)}


_BASE = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": "False",
    **_data(_GSM8K),
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "512",
    "data.filter_overlong_prompts": "True",
    "data.truncation": "error",
    **_models("deepseek-ai/deepseek-llm-7b-chat"),
    "actor_rollout_ref.model.use_remove_padding": "True",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "True",
    "actor_rollout_ref.actor.optim.lr": "1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "16",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "False",
    "actor_rollout_ref.actor.use_kl_loss": "False",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "4",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.4",
    "critic.optim.lr": "1e-5",
    "critic.model.use_remove_padding": "True",
    "critic.model.enable_gradient_checkpointing": "True",
    "critic.ppo_micro_batch_size_per_gpu": "32",
    "critic.model.fsdp_config.param_offload": "False",
    "critic.model.fsdp_config.optimizer_offload": "False",
    "trainer.critic_warmup": "0",
    "trainer.logger": "[console,wandb]",
    "trainer.project_name": "verl_example_gsm8k",
    "trainer.experiment_name": "deepseek_llm_7b_function_rm",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
    "trainer.save_freq": "20",
    "trainer.test_freq": "1",
    "trainer.total_epochs": "15",
}
_REWARD_MODEL = {
    "reward_model.enable": "True",
    "reward_model.use_reward_loop": "True",
    "reward_model.rollout.name": "vllm",
    "reward_model.rollout.gpu_memory_utilization": "0.8",
    "reward_model.num_workers": "8",
}


def _reward_model(path: str, prompt: int, response: int, parallel: int = 1) -> dict[str, str]:
    return {
        **_REWARD_MODEL,
        "reward_model.model.path": path,
        "reward_model.rollout.tensor_model_parallel_size": str(parallel),
        "reward_model.rollout.prompt_length": str(prompt),
        "reward_model.rollout.response_length": str(response),
    }


_LONG = {  # 4096 tokens of prompt and of response, in micro-batches by tokens
    **_without(_BASE, "micro_batch_size_per_gpu"),
    **_data(_GSM8K_AND_MATH),
    **_models("Qwen/Qwen2-7B-Instruct"),
    "data.train_batch_size": "4096",
    "data.max_prompt_length": "4096",
    "data.max_response_length": "4096",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "512",
    "actor_rollout_ref.actor.use_dynamic_bsz": "True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "24000",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "24000",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.5",
    "critic.ppo_max_token_len_per_gpu": "98304",
    "trainer.experiment_name": "qwen2-7b_function_rm_bsz8k_p4k_r4k_seq_packing",
    "trainer.val_before_train": "False",
    "trainer.test_freq": "5",
}
_LONG_WITH_REWARD_MODEL = {
    **_LONG,
    **_reward_model("sfairXC/FsfairX-LLaMA3-RM-v0.1", 8192, 4096),
    "data.return_raw_chat": "True",
    "critic.use_dynamic_bsz": "True",
    "trainer.experiment_name": "qwen2-7b_hybrid_rm_bsz8k_p4k_r4k_seq_packing",
}
_QWEN_3B = {
    **_data(_GSM8K_AND_MATH),
    **_models('"~/models/Qwen2.5-3B-Instruct"'),
    "data.max_prompt_length": "1024",
    "data.max_response_length": "2048",
    "data.return_raw_chat": "True",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.1",
    "critic.optim.lr_warmup_steps_ratio": "0.05",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
    "trainer.project_name": "verl_test_qwen25_rm",
    "trainer.save_freq": "-1",
    "trainer.test_freq": "10",
}
_IN_SHARDS = {  # a reward model that runs among verl's own workers
    **_QWEN_3B,
    "reward_model.enable": "True",
    "reward_model.use_reward_loop": "False",
    "reward_model.model.path": '"~/models/Skywork-Reward-V2-Llama-3.2-3B"',
    "reward_model.model.use_remove_padding": "True",
    "reward_model.model.fsdp_config.param_offload": "True",
    "reward_model.micro_batch_size_per_gpu": "32",
    "trainer.experiment_name": "legacy_fsdp_reward_model",
    "trainer.val_before_train": "True",
}
_BESIDE = {  # a reward model that is served on the same devices
    **_QWEN_3B,
    **_reward_model('"~/models/Skywork-Reward-V2-Llama-3.2-3B"', 4096, 4096),
    "trainer.experiment_name": "reward_loop_colocate_reward_model",
    "trainer.val_before_train": "False",
}
_MEGATRON_SIZES = {
    f"actor_rollout_ref.{role}.megatron.{kind}_model_parallel_size": "2"
    for role in ("actor", "ref")
    for kind in ("tensor", "pipeline")
}
_MEGATRON = {
    **_without(_BASE, "_offload", "use_remove_padding", "enable_gradient_checkpointing"),
    **_data(_GSM8K_AND_MATH),
    **_MEGATRON_SIZES,
    "actor_rollout_ref.actor.strategy": "megatron",  # as in the ppo_megatron_trainer.yaml that they name
    "critic.strategy": "megatron",
    "data.max_prompt_length": "1024",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
    "critic.ppo_micro_batch_size_per_gpu": "4",
    "trainer.project_name": "verl_ppo_gsm8k_math_examples",
    "trainer.experiment_name": "deepseek_llm_7b_megatron",
    "trainer.test_freq": "5",
    "trainer.total_epochs": "100",
}


def _megatron_of_all(folder: str, **values: str) -> dict[str, str]:
    roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    values = {**values, "use_dist_checkpointing": "True", "dist_checkpointing_path": f"/data/mcore_ckpt/{folder}"}
    return {f"{role}.megatron.{key}": value for role in roles for key, value in values.items()}


_EXPERTS = {
    **_MEGATRON,
    **_data(_GSM8K),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "2",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.7",
    "trainer.project_name": "verl_megatron_gsm8k_examples",
    "trainer.nnodes": "4",
}
_PROFILED = {
    **{f"{role}.profiler.enable": "True" for role in ("actor_rollout_ref.actor", "critic")},
    **{f"{role}.profiler.ranks": "[0,4]" for role in ("actor_rollout_ref.actor", "critic")},
    **{f"{role}.profiler.all_ranks": "False" for role in ("actor_rollout_ref.actor", "critic")},
    "global_profiler.tool": "nsys",
    "global_profiler.global_tool_config.nsys.discrete": "True",
    "trainer.save_freq": "-1",
    "trainer.test_freq": "-1",
}

_SCRIPTS: dict[str, dict[str, str]] = {
    "run_deepseek7b_llm": {"trainer.use_legacy_worker_impl": "auto"},
    "run_deepseek7b_llm_modelscope": {},
    "run_deepseek7b_llm_pfppo": {
        "algorithm.use_pf_ppo": "True",
        "algorithm.pf_ppo.reweight_method": "pow",
        "algorithm.pf_ppo.weight_pow": "2.0",
        "actor_rollout_ref.rollout.n": "5",
    },
    "run_deepseek7b_llm_sandbox_fusion": {
        "reward_model.sandbox_fusion.url": "https://sandbox.example.com/run_code",
        "reward_model.sandbox_fusion.max_concurrent": "128",
        "reward_model.reward_manager": "prime",
        "data.train_files": '"~/data/Eurus-2-RL-Data/train.parquet"',
        "data.val_files": '"~/data/Eurus-2-RL-Data/validation.parquet"',
        "trainer.project_name": "verl_example_sandbox_fusion",
        "trainer.experiment_name": "deepseek_llm_7b_function_sandbox_fusion",
    },
    "run_deepseek7b_llm_sp2": {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "32",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "64",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
        "critic.ulysses_sequence_parallel_size": "2",
        "critic.ppo_micro_batch_size_per_gpu": "64",
        "trainer.experiment_name": "deepseek_llm_7b_function_rm_sp2",
        "trainer.test_freq": "5",
    },
    "run_gemma": {
        **_models("google/gemma-2-2b-it"),
        "data.train_batch_size": "512",
        "data.max_prompt_length": "1024",
        "actor_rollout_ref.model.use_remove_padding": "False",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "128",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
        "critic.model.use_remove_padding": "False",
        "critic.model.enable_gradient_checkpointing": "False",
        "critic.ppo_micro_batch_size_per_gpu": "4",
        "trainer.project_name": "verl_example",
        "trainer.experiment_name": "gemma2b_function_rm",
        "trainer.n_gpus_per_node": "2",
        "trainer.test_freq": "10",
    },
    "run_qwen2-7b_rm": {
        **_data(_GSM8K_AND_MATH),
        **_models('"~/models/Qwen2-7B-Instruct"'),
        **_reward_model('"~/models/FsfairX-LLaMA3-RM-v0.1"', 2048, 1024),
        "data.max_prompt_length": "1024",
        "data.return_raw_chat": "True",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.1",
        "critic.optim.lr_warmup_steps_ratio": "0.05",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "16",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
        "trainer.project_name": "verl_example",
        "trainer.experiment_name": "Qwen2-7B-Instruct_hybrid_rm",
        "trainer.val_before_train": "False",
        "trainer.test_freq": "5",
    },
    "run_qwen2-7b_rm_legacy": _IN_SHARDS,
    "run_qwen2-7b_rm_reward_loop_colocate": {
        **_BESIDE,
        "reward_model.model.use_remove_padding": "True",
        "reward_model.model.fsdp_config.param_offload": "True",
        "reward_model.micro_batch_size_per_gpu": "32",
    },
    "run_qwen2-7b_rm_seq_balance": _LONG_WITH_REWARD_MODEL,
    "run_qwen2-7b_rm_seq_balance_fused_kernels": {
        **_LONG_WITH_REWARD_MODEL,
        "actor_rollout_ref.model.use_fused_kernels": "True",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "triton",
        "trainer.experiment_name": "qwen2-7b_hybrid_rm_bsz8k_p4k_r4k_seq_packing_fused_kernel",
    },
    "run_qwen2-7b_rm_seq_balance_nsys": {
        **_LONG_WITH_REWARD_MODEL,
        **_PROFILED,
        **_data(_GSM8K),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "2",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "12000",
        "critic.ppo_micro_batch_size_per_gpu": "2",
        "global_profiler.steps": "[1,2,5]",
        "global_profiler.profile_continuous_steps": "True",
        "trainer.total_training_steps": "6",
    },
    "run_qwen2-7b_seq_balance": {
        **_LONG,
        "data.return_raw_chat": "True",
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    },
    "run_qwen2-7b_sglang_seq_balance": {**_LONG, "actor_rollout_ref.rollout.name": "sglang"},
    "run_qwen2.5-32b": {
        **_data(_GSM8K_AND_MATH),
        **_models("Qwen/Qwen2.5-32B-Instruct"),
        "data.max_prompt_length": "1024",
        "data.max_response_length": "1024",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "16",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.5",
        "critic.model.enable_gradient_checkpointing": "False",
        "critic.ppo_micro_batch_size_per_gpu": "8",
        "trainer.project_name": "verl_example",
        "trainer.experiment_name": "Qwen2.5-32B-Instruct_function_rm",
        "trainer.nnodes": "4",
        "trainer.test_freq": "10",
    },
    "run_qwen2.5-3b_rm_legacy": _IN_SHARDS,
    "run_qwen2.5-3b_rm_reward_loop_colocate": _BESIDE,
    "run_qwen3-8b_npu": {
        **_without(_BASE, "use_kl_in_reward", "filter_overlong_prompts", "truncation", "total_epochs"),
        **_models("Qwen/Qwen3-8B"),
        "data.train_files": '"~/data/dapo-math-17k.parquet"',
        "data.val_files": '"~/data/dapo-math-17k.parquet"',
        "data.train_batch_size": "256",
        "data.max_prompt_length": "2000",
        "data.max_response_length": "12000",
        "data.shuffle": "False",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "1",
        "actor_rollout_ref.actor.fsdp_config.param_offload": "True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "2",
        "actor_rollout_ref.actor.use_dynamic_bsz": "True",
        "actor_rollout_ref.actor.use_torch_compile": "False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.9",
        "actor_rollout_ref.rollout.max_num_batched_tokens": "14000",
        "actor_rollout_ref.rollout.max_num_seqs": "64",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "True",
        "actor_rollout_ref.rollout.enable_chunked_prefill": "True",
        "actor_rollout_ref.rollout.enforce_eager": "False",
        "critic.ppo_micro_batch_size_per_gpu": "1",
        "critic.ulysses_sequence_parallel_size": "2",
        "critic.model.fsdp_config.param_offload": "True",
        "critic.model.fsdp_config.optimizer_offload": "True",
        "critic.use_dynamic_bsz": "True",
        "trainer.logger": "console",
        "trainer.project_name": "verl_example_dapo_math_17k",
        "trainer.experiment_name": "qwen3_8b_fsdp",
        "trainer.test_freq": "-1",
        "trainer.val_before_train": "False",
        "trainer.max_actor_ckpt_to_keep": "1",
        "trainer.max_critic_ckpt_to_keep": "1",
        "trainer.total_training_steps": "100",
    },
    "run_deepseek_math_gsm8k_megatron": _MEGATRON,
    "run_deepseek_math_gsm8k_megatron_nsys": {
        **_MEGATRON,
        **_PROFILED,
        **_data(_GSM8K),
        "data.train_batch_size": "256",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.8",
        "global_profiler.steps": "[1]",
        "trainer.total_training_steps": "1",
    },
    "run_qwen2-7b_math_gsm8k_megatron": {
        **_MEGATRON,
        **_models("Qwen/Qwen2-7B-Instruct"),
        "trainer.experiment_name": "qwen2_7b_megatron",
    },
    "run_deepseek_full_hh_rlhf": {
        **_MEGATRON,
        **_without(_MEGATRON_SIZES, "_size"),
        **_reward_model("deepseek-ai/deepseek-llm-7b-chat", 256, 128, parallel=4),
        "data.train_files": '"~/data/full_hh_rlhf/rl/train.parquet"',
        "data.val_files": '"~/data/full_hh_rlhf/rl/train.parquet"',
        "data.train_batch_size": "512",
        "data.max_prompt_length": "128",
        "data.max_response_length": "128",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "128",
        "trainer.project_name": "verl_megatron_full_hh_rlhf_examples",
        "trainer.experiment_name": "deepseek_llm_7b_model_rm",
    },
    "run_qwen1.5_moe_a2.7b-gsm8k_megatron": {
        **_EXPERTS,
        **_models("/data/models/Qwen/Qwen1.5-MoE-A2.7B-Chat"),
        **_megatron_of_all(
            "Qwen1.5-MoE-A2.7B-Chat",
            tensor_model_parallel_size="4",
            pipeline_model_parallel_size="2",
            context_parallel_size="1",
        ),
        "trainer.experiment_name": "qwen1.5_moe_nochat",
    },
    "run_moonlight16b_a3b_gsm8k_megatron": {
        **_EXPERTS,
        **_models("/data/models/moonshotai/Moonlight-16B-A3B-Instruct"),
        **_megatron_of_all(
            "Moonlight-16B-A3B-Instruct",
            tensor_model_parallel_size="8",
            pipeline_model_parallel_size="2",
            expert_model_parallel_size="8",
            expert_tensor_parallel_size="1",
            param_offload="False",
        ),
        **{f"actor_rollout_ref.actor.megatron.{kind}_offload": "False" for kind in ("optimizer", "grad")},
        **{f"critic.megatron.{kind}_offload": "False" for kind in ("optimizer", "grad")},
        "+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage": "13",
        "data.trust_remote_code": "True",
        "actor_rollout_ref.model.trust_remote_code": "True",
        "critic.model.trust_remote_code": "True",
        "trainer.experiment_name": "moonlight_16b_a3b_instruct_1node",
        "trainer.save_freq": "-1",
        "trainer.val_before_train": "False",
    },
}

SCRIPTS = {
    name: [f"{key}={value}" for key, value in {**_BASE, **changes}.items() if value]
    for name, changes in _SCRIPTS.items()
}
"""Name of a script, without its ending, -> its settings."""
