"""The command of verl's PPO page, key for key: run_gemma.sh written out, then the page's own overrides."""

import pytest

from tether.config import load_config

RUN_GEMMA = """
algorithm.adv_estimator=gae
algorithm.use_kl_in_reward=False
data.train_files=/root/data/gsm8k/train.parquet
data.val_files=/root/data/gsm8k/test.parquet
data.train_batch_size=512
data.max_prompt_length=1024
data.max_response_length=512
data.filter_overlong_prompts=True
data.truncation='error'
actor_rollout_ref.model.path=google/gemma-2-2b-it
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
critic.optim.lr=1e-5
critic.model.use_remove_padding=False
critic.model.path=google/gemma-2-2b-it
critic.model.enable_gradient_checkpointing=False
critic.ppo_micro_batch_size_per_gpu=4
critic.model.fsdp_config.param_offload=False
critic.model.fsdp_config.optimizer_offload=False
trainer.critic_warmup=0
trainer.logger='["console","wandb"]'
trainer.project_name='verl_example'
trainer.experiment_name='gemma2b_function_rm'
trainer.n_gpus_per_node=2
trainer.nnodes=1
trainer.save_freq=20
trainer.test_freq=10
trainer.total_epochs=15
""".strip().splitlines()

PAGE = """
trainer.n_gpus_per_node=1
actor_rollout_ref.rollout.tensor_model_parallel_size=1
trainer.logger=[console]
critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
data.train_batch_size=256
actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_micro_batch_size=2
critic.ppo_micro_batch_size=2
""".strip().splitlines()


@pytest.fixture(scope="module")
def loaded():
    return load_config(None, [*RUN_GEMMA, *PAGE])


def test_data(loaded):
    data = loaded.config.data
    assert data.train_files == ("/root/data/gsm8k/train.parquet",)
    assert data.val_files == ("/root/data/gsm8k/test.parquet",)
    assert (data.train_batch_size, data.max_prompt_length, data.max_response_length) == (256, 1024, 512)
    assert data.filter_overlong_prompts
    assert data.truncation == "error"
    assert data.shuffle


def test_policy(loaded):
    policy = loaded.config.actor_rollout_ref
    assert policy.model.path == policy.model.tokenizer_path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert not policy.model.use_remove_padding
    assert policy.model.enable_gradient_checkpointing
    assert policy.actor.optim.lr == 1e-6
    assert policy.actor.ppo_mini_batch_size == 64
    assert policy.actor.ppo_micro_batch_size_per_gpu == 2
    assert policy.actor.ppo_micro_batch_size is None
    assert policy.actor.ppo_epochs == 1
    assert (policy.actor.clip_ratio_low, policy.actor.clip_ratio_high, policy.actor.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert not policy.actor.use_kl_loss
    assert policy.actor.optim.clip_grad == 1.0
    assert policy.actor.fsdp_config.dtype == "auto"
    assert policy.rollout.log_prob_micro_batch_size_per_gpu == 4
    assert policy.ref.log_prob_micro_batch_size_per_gpu == 2
    assert (policy.rollout.prompt_length, policy.rollout.response_length) == (1024, 512)
    assert (policy.rollout.name, policy.rollout.gpu_memory_utilization) == ("vllm", 0.4)
    assert (policy.rollout.n, policy.rollout.temperature, policy.rollout.top_p) == (1, 1.0, 1.0)


def test_critic(loaded):
    critic = loaded.config.critic
    assert critic.enable
    assert critic.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert critic.optim.lr == 1e-5
    assert critic.ppo_mini_batch_size == 64
    assert critic.ppo_micro_batch_size_per_gpu == critic.forward_micro_batch_size_per_gpu == 2
    assert not critic.model.enable_gradient_checkpointing
    assert critic.cliprange_value == 0.5


def test_trainer_and_algorithm(loaded):
    trainer, algorithm = loaded.config.trainer, loaded.config.algorithm
    assert trainer.logger == ("console",)
    assert (trainer.save_freq, trainer.test_freq, trainer.total_epochs) == (20, 10, 15)
    assert trainer.default_local_dir == "checkpoints/verl_example/gemma2b_function_rm"
    assert (algorithm.adv_estimator, algorithm.gamma, algorithm.lam) == ("gae", 1.0, 1.0)
    assert not algorithm.use_kl_in_reward


def test_every_note(loaded):
    actor, critic = loaded.notes
    assert actor == (
        "actor_rollout_ref.actor.ppo_micro_batch_size=2 counts, being later than its other name "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    )
    assert critic == (
        "critic.ppo_micro_batch_size=2 counts, being later than its other name critic.ppo_micro_batch_size_per_gpu=4"
    )


def test_sources(loaded):
    sources = loaded.sources
    assert sources["data.train_batch_size"] == "command line"
    assert sources["data.shuffle"] == "default"
    assert sources["critic.ppo_mini_batch_size"] == "inherits actor_rollout_ref.actor.ppo_mini_batch_size"
    assert sources["critic.ppo_micro_batch_size_per_gpu"] == "command line, as critic.ppo_micro_batch_size"
    assert sources["actor_rollout_ref.actor.clip_ratio_low"] == "inherits actor_rollout_ref.actor.clip_ratio"
