"""Keys whose effect exists only on other set-ups: accepted, and said to do nothing here."""

from __future__ import annotations

from collections.abc import Mapping

NO_SERVER = "the native engine samples in this process, so there is no inference server to set up"
NO_SHARDS = "on one device there are no shards to place"
ONE_PROCESS = "everything runs in one process"
BOUNDED = "log-probs and entropy are always computed in bounded pieces"
NO_KERNELS = "no such kernels are used here"
WHOLE = "a checkpoint always holds everything, and is complete before training goes on"
READ_AT_START = "prompts are read and tokenized once, at the start"
PROFILER = "no profiler is running"
KEPT = "every held-out response is written to samples.jsonl in the folder of the run"

ELSEWHERE: Mapping[str, str] = {
    "actor_rollout_ref.rollout.gpu_memory_utilization": NO_SERVER,
    "actor_rollout_ref.rollout.*parallel_size": NO_SERVER,
    "actor_rollout_ref.rollout.max_num_batched_tokens": NO_SERVER,
    "actor_rollout_ref.rollout.enforce_eager": NO_SERVER,
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": NO_SERVER,
    "actor_rollout_ref.rollout.enable_chunked_prefill": NO_SERVER,
    "actor_rollout_ref.rollout.enable_prefix_caching": NO_SERVER,
    "actor_rollout_ref.rollout.free_cache_engine": NO_SERVER,
    "actor_rollout_ref.rollout.multi_stage_wake_up": NO_SERVER,
    "actor_rollout_ref.rollout.load_format": NO_SERVER,
    "actor_rollout_ref.rollout.layered_summon": NO_SERVER,
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": NO_SERVER,
    "actor_rollout_ref.rollout.disable_log_stats": NO_SERVER,
    "actor_rollout_ref.rollout.skip_tokenizer_init": NO_SERVER,
    "actor_rollout_ref.rollout.engine_kwargs.*": NO_SERVER,
    "actor_rollout_ref.rollout.prometheus.*": NO_SERVER,
    "actor_rollout_ref.rollout.agent.num_workers": NO_SERVER,
    "actor_rollout_ref.rollout.calculate_log_probs": "the sampler's log-probs are always kept",
    "*.fsdp_config.wrap_policy.*": NO_SHARDS,
    "*.fsdp_config.*offload*": NO_SHARDS,
    "*.fsdp_config.reshard_after_forward": NO_SHARDS,
    "*.fsdp_config.fsdp_size": NO_SHARDS,
    "*.fsdp_config.forward_prefetch": NO_SHARDS,
    "*.fsdp_config.use_orig_params": NO_SHARDS,
    "*.fsdp_config.full_determinism": "runs here are deterministic without it",
    "trainer.balance_batch": NO_SHARDS,
    "*.use_torch_compile": NO_KERNELS,
    "*.use_liger": NO_KERNELS,
    "*.use_fused_kernels": NO_KERNELS,
    "*.fused_kernel_options.*": NO_KERNELS,
    "*.tiled_mlp.*": NO_KERNELS,
    "*.enable_activation_offload": NO_KERNELS,
    "*.entropy_from_logits_with_chunking": BOUNDED,
    "*.entropy_checkpointing": BOUNDED,
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "computed for the estimators that need it, and for no other",
    "*.sum_pi_squared_checkpointing": BOUNDED,
    "actor_rollout_ref.actor.calculate_entropy": "the entropy is always logged",
    "*.checkpoint.save_contents": WHOLE,
    "*.checkpoint.async_save": WHOLE,
    "*.use_shm": READ_AT_START,
    "data.dataloader_num_workers": READ_AT_START,
    "data.filter_overlong_prompts_workers": READ_AT_START,
    "data.return_*": READ_AT_START,
    "trainer.log_val_generations": KEPT,
    "trainer.validation_data_dir": KEPT,
    "data.validation_shuffle": "every held-out row is scored once, so their order does not matter",
    "*.nccl_timeout": ONE_PROCESS,
    "trainer.ray_wait_register_center_timeout": ONE_PROCESS,
    "trainer.use_legacy_worker_impl": "there is one training path",
    "reward_model.overlong_buffer.log": "the punishment is always logged",
    "reward_model.use_reward_loop": "a response is always scored as soon as it is complete",
    "reward_model.launch_reward_fn_async": "a response is always scored as soon as it is complete",
    "*.profiler.*": PROFILER,
    "global_profiler.*": PROFILER,
}
"""Key, or pattern of keys, whose effect exists only on other set-ups -> why there is none here."""
