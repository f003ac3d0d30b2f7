"""The command lines of verl's examples/ppo_trainer, as lists of overrides: a base and what each script changes."""

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
M = "actor_rollout_ref.model"
GSM8K = ["data.train_files=/data/gsm8k/train.parquet", "data.val_files=/data/gsm8k/test.parquet"]
GSM8K_MATH = [
    "data.train_files=['/data/gsm8k/train.parquet', '/data/math/train.parquet']",
    "data.val_files=['/data/gsm8k/test.parquet', '/data/math/test.parquet']",
]


def paths(model: str) -> list[str]:
    return [f"{M}.path={model}", f"critic.model.path={model}"]


COMMON = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=False",
    *GSM8K,
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=512",
    "data.filter_overlong_prompts=True",
    "data.truncation='error'",
    *paths("deepseek-ai/deepseek-llm-7b-chat"),
    f"{A}.optim.lr=1e-6",
    f"{A}.ppo_mini_batch_size=256",
    f"{A}.use_kl_loss=False",
    f"{R}.name=vllm",
    f"{R}.tensor_model_parallel_size=4",
    f"{R}.gpu_memory_utilization=0.4",
    "critic.optim.lr=1e-5",
    "trainer.critic_warmup=0",
    """trainer.logger='["console","wandb"]'""",
    "trainer.project_name=verl_example_gsm8k",
    "trainer.experiment_name=deepseek_llm_7b_function_rm",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=1",
    "trainer.total_epochs=15",
]
MICRO = [
    f"{A}.ppo_micro_batch_size_per_gpu=16",
    f"{R}.log_prob_micro_batch_size_per_gpu=32",
    "critic.ppo_micro_batch_size_per_gpu=32",
]
FSDP_ONLY = [
    f"{M}.use_remove_padding=True",
    f"{M}.enable_gradient_checkpointing=True",
    f"{A}.fsdp_config.param_offload=False",
    f"{A}.fsdp_config.optimizer_offload=False",
    "critic.model.use_remove_padding=True",
    "critic.model.enable_gradient_checkpointing=True",
    "critic.model.fsdp_config.param_offload=False",
    "critic.model.fsdp_config.optimizer_offload=False",
]
F = [*COMMON, *FSDP_ONLY, *MICRO]
GEMMA = [
    "data.train_batch_size=512",
    "data.max_prompt_length=1024",
    *paths("google/gemma-2-2b-it"),
    f"{M}.use_remove_padding=False",
    "critic.model.use_remove_padding=False",
    f"{A}.ppo_mini_batch_size=128",
    f"{A}.ppo_micro_batch_size_per_gpu=4",
    f"{R}.log_prob_micro_batch_size_per_gpu=4",
    f"{R}.tensor_model_parallel_size=2",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "trainer.project_name=verl_example",
    "trainer.experiment_name=gemma2b_function_rm",
    "trainer.n_gpus_per_node=2",
    "trainer.test_freq=10",
]


def reward_model(path: str, tensor_parallel: int, prompt: int, response: int) -> list[str]:
    return [
        "reward_model.enable=True",
        f"reward_model.model.path={path}",
        "reward_model.use_reward_loop=True",
        "reward_model.rollout.name=vllm",
        "reward_model.rollout.gpu_memory_utilization=0.8",
        f"reward_model.rollout.tensor_model_parallel_size={tensor_parallel}",
        f"reward_model.rollout.prompt_length={prompt}",
        f"reward_model.rollout.response_length={response}",
        "reward_model.num_workers=8",
    ]


# Q leaves the row-wise micro-batch keys out: it batches by tokens.
Q = [
    *COMMON,
    *FSDP_ONLY,
    *GSM8K_MATH,
    "data.train_batch_size=4096",
    "data.max_prompt_length=4096",
    "data.max_response_length=4096",
    *paths("Qwen/Qwen2-7B-Instruct"),
    f"{A}.ppo_mini_batch_size=512",
    f"{A}.use_dynamic_bsz=True",
    f"{A}.ppo_max_token_len_per_gpu=24000",
    f"{R}.log_prob_max_token_len_per_gpu=24000",
    f"{R}.tensor_model_parallel_size=2",
    f"{R}.gpu_memory_utilization=0.5",
    "critic.ppo_max_token_len_per_gpu=98304",
    "trainer.val_before_train=False",
    "trainer.test_freq=5",
    "data.return_raw_chat=True",
]
MEGATRON = [
    *COMMON,
    *GSM8K_MATH,
    "data.max_prompt_length=1024",
    f"{A}.ppo_micro_batch_size_per_gpu=4",
    f"{R}.log_prob_micro_batch_size_per_gpu=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "trainer.project_name=verl_ppo_gsm8k_math_examples",
    "trainer.experiment_name=deepseek_llm_7b_megatron",
    "trainer.test_freq=5",
    "trainer.total_epochs=100",
]
TP2_PP2 = [
    f"{section}.megatron.{kind}_model_parallel_size=2"
    for section in (A, "actor_rollout_ref.ref")
    for kind in ("pipeline", "tensor")
]
MOE_SECTIONS = (A, "actor_rollout_ref.ref", "critic")


def megatron_moe(sizes: dict[str, int]) -> list[str]:
    keys = {**sizes, "use_dist_checkpointing": True, "dist_checkpointing_path": "/ckpt"}
    return [f"{section}.megatron.{key}={value}" for section in MOE_SECTIONS for key, value in keys.items()]


QWEN_MOE = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}
MOONLIGHT = {
    "pipeline_model_parallel_size": 2,
    "tensor_model_parallel_size": 8,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
}
OFFLOAD = [f"{s}.megatron.{part}_offload=False" for s in (A, "critic") for part in ("param", "optimizer", "grad")]
TRUST = ["data.trust_remote_code=True", f"{M}.trust_remote_code=True", "critic.model.trust_remote_code=True"]

SP = "ulysses_sequence_parallel_size"
REFUSED_TP_PP = {text.split("=")[0] for text in TP2_PP2}

SCRIPTS: dict[str, tuple[list[str], set[str]]] = {
    "run_deepseek7b_llm": ([*F, "trainer.use_legacy_worker_impl=auto"], set()),
    "run_deepseek7b_llm_modelscope": (F, set()),
    "run_deepseek7b_llm_pfppo": (
        [
            *F,
            "algorithm.use_pf_ppo=True",
            "algorithm.pf_ppo.reweight_method=pow",
            "algorithm.pf_ppo.weight_pow=2.0",
            f"{R}.n=5",
        ],
        set(),
    ),
    "run_deepseek7b_llm_sandbox_fusion": (
        [
            *F,
            "reward_model.sandbox_fusion.url='https://sandbox.example/run_code'",
            "reward_model.sandbox_fusion.max_concurrent=128",
            "reward_model.reward_manager=prime",
        ],
        {"reward_model.reward_manager"},
    ),
    "run_deepseek7b_llm_sp2": (
        [
            *F,
            f"{A}.ppo_micro_batch_size_per_gpu=32",
            f"{A}.{SP}=2",
            f"{R}.log_prob_micro_batch_size_per_gpu=64",
            f"{R}.gpu_memory_utilization=0.6",
            f"critic.{SP}=2",
            "critic.ppo_micro_batch_size_per_gpu=64",
            "trainer.test_freq=5",
        ],
        {f"{A}.{SP}", f"critic.{SP}"},
    ),
    "run_gemma": ([*F, *GEMMA], set()),
    "run_qwen2-7b_rm": (
        [
            *F,
            *GSM8K_MATH,
            "data.max_prompt_length=1024",
            "data.return_raw_chat=True",
            *paths("/models/Qwen2-7B-Instruct"),
            f"{A}.optim.lr_warmup_steps_ratio=0.1",
            "critic.optim.lr_warmup_steps_ratio=0.05",
            f"{R}.log_prob_micro_batch_size_per_gpu=16",
            f"{R}.tensor_model_parallel_size=1",
            f"{R}.gpu_memory_utilization=0.6",
            *reward_model("/models/FsfairX-LLaMA3-RM-v0.1", 1, 2048, 1024),
            "trainer.val_before_train=False",
        ],
        set(),
    ),
    "run_qwen2-7b_rm_seq_balance": (
        [*Q, "critic.use_dynamic_bsz=True", *reward_model("sfairXC/FsfairX-LLaMA3-RM-v0.1", 1, 8192, 4096)],
        set(),
    ),
    "run_qwen2-7b_seq_balance": ([*Q, f"{R}.mode=async", f"{R}.multi_turn.format=hermes"], set()),
    "run_qwen2-7b_sglang_seq_balance": ([*Q, f"{R}.name=sglang"], set()),
    "run_qwen2.5-32b": (
        [
            *F,
            *GSM8K_MATH,
            "data.max_prompt_length=1024",
            "data.max_response_length=1024",
            *paths("Qwen/Qwen2.5-32B-Instruct"),
            f"{A}.ppo_micro_batch_size_per_gpu=8",
            f"{M}.enable_gradient_checkpointing=False",
            f"{M}.enable_gradient_checkpointing=True",
            "critic.model.enable_gradient_checkpointing=False",
            "trainer.nnodes=4",
        ],
        {"trainer.nnodes"},
    ),
    "run_deepseek_math_gsm8k_megatron": ([*MEGATRON, *TP2_PP2], {*REFUSED_TP_PP}),
    "run_qwen2-7b_math_gsm8k_megatron": (
        [*MEGATRON, *TP2_PP2, *paths("Qwen/Qwen2-7B-Instruct")],
        {*REFUSED_TP_PP},
    ),
    "run_deepseek_full_hh_rlhf": (
        [
            *MEGATRON,
            "data.train_batch_size=512",
            "data.max_prompt_length=128",
            "data.max_response_length=128",
            f"{A}.ppo_mini_batch_size=128",
            *reward_model("deepseek-ai/deepseek-llm-7b-chat", 4, 256, 128),
        ],
        set(),
    ),
    "run_qwen1.5_moe_a2.7b-gsm8k_megatron": (
        [*MEGATRON, *GSM8K, "trainer.nnodes=4", *megatron_moe(QWEN_MOE)],
        {"trainer.nnodes"} | {text.split("=")[0] for text in megatron_moe(QWEN_MOE) if "context_parallel" not in text},
    ),
    "run_moonlight16b_a3b_gsm8k_megatron": (
        [
            *MEGATRON,
            *GSM8K,
            *TRUST,
            "trainer.nnodes=4",
            "trainer.save_freq=-1",
            f"+{A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=13",
            *megatron_moe(MOONLIGHT),
            *OFFLOAD,
        ],
        {"trainer.nnodes", f"{A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage"}
        | {text.split("=")[0] for text in megatron_moe(MOONLIGHT) if "expert_tensor" not in text},
    ),
}
"""Script -> its overrides, and the keys among them that are refused."""
