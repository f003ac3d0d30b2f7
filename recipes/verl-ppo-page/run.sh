#!/usr/bin/env bash
# The command of verl's PPO page, key for key: run_gemma.sh, then what the page adds to it. Later settings win.
#   MODEL=path/to/model DATA=path/with/gsm8k recipes/verl-ppo-page/run.sh [KEY=VALUE]...
# TETHER="tether config check --no-files" only checks the configuration.
set -euo pipefail
MODEL="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
DATA="${DATA:-$HOME/data}"
read -ra TETHER <<< "${TETHER:-tether train}"

run_gemma=(
    algorithm.adv_estimator=gae
    algorithm.use_kl_in_reward=False
    data.train_files="$DATA/gsm8k/train.parquet"
    data.val_files="$DATA/gsm8k/test.parquet"
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
)
page=(
    trainer.n_gpus_per_node=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    trainer.logger="['console']"
    critic.model.path="$MODEL"
    actor_rollout_ref.model.path="$MODEL"
    data.train_batch_size=256
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size=2
    critic.ppo_micro_batch_size=2
)
exec "${TETHER[@]}" "${run_gemma[@]}" "${page[@]}" "$@"
