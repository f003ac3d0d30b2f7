"""Keys that RLinf reads only for algorithms and kinds of run that tether does not support, and for its workers.

The keys that select such an algorithm (`algorithm.loss_type`, `algorithm.adv_type`, `runner.task_type`, `data.type`)
are refused by their own rows; without them RLinf does not read the keys here, either.
"""

from __future__ import annotations

from tether.integrations.rlinf.rows import Checked, NoEffect, Refused, Table

LOSSES = NoEffect("read with a loss that algorithm.loss_type names (SAC, IQL, NFT, DAgger), and with no other")
KINDS = NoEffect("read by other kinds of run (supervised, offline, agents), which runner.task_type names")
WORKERS = NoEffect("between workers, which have nothing to send here")
MEMORY = NoEffect("changes memory and speed, and no result")
AGENTS = Refused("runs of agents with tools are not read; a native configuration has tools of its own")
ACTOR_COMPUTES = NoEffect("the actor computes the log-probs that other workers compute there")

OTHER_LOSSES: Table = dict.fromkeys(
    (
        "actor.compile_model", "actor.critic_optim.*", "actor.value_optim.*", "actor.use_fsdp_wrap",
        "actor.config_name", "actor.model.num_q_heads", "actor.model.add_q_head",
        "actor.sft_data_path", "actor.recv_drain_max_trajectories", "actor.eval_batch_size",
        "actor.enable_drq", "actor.offline_*", "actor.model.iql_config.*", "actor.model.q_head_type",
        "algorithm.actor_agg_q", "algorithm.adv_clip_max", "algorithm.agg_q", "algorithm.backup_entropy",
        "algorithm.critic_actor_ratio", "algorithm.dagger.*",
        "algorithm.critic_subsample_size", "algorithm.demo_buffer.*", "algorithm.replay_buffer.*",
        "algorithm.entropy_tuning.*", "algorithm.dpo_beta", "algorithm.dropout_rate", "algorithm.expectile",
        "algorithm.drpo_*", "algorithm.hidden_dims", "algorithm.max_drift", "algorithm.nft_*", "algorithm.q_head_type",
        "algorithm.recompute_v", "algorithm.target_update_freq", "algorithm.target_update_type", "algorithm.tau",
        "algorithm.temperature", "algorithm.train_actor_steps", "algorithm.enable_accumulate_batch",
        "algorithm.accumulated_threshold", "rollout.expert_model.*", "runner.expert_ckpt_path",
        "algorithm.enable_drq", "algorithm.target_entropy", "algorithm.actor_weight_schedule.*",
        "algorithm.rlt_schedule.*", "algorithm.reference_dropout_prob", "algorithm.q_weight", "algorithm.bc_weight",
        "algorithm.num_updates_per_step", "algorithm.actor_update_action_noise", "rollout.rlt_feature_model.*",
    ),
    LOSSES,
)  # fmt: skip
OTHER_KINDS: Table = dict.fromkeys(
    (
        "actor.pack_traj", "algorithm.advantage_mode", "algorithm.loss_scales", "algorithm.reward_fillna_value",
        "rollout.custom_chat_template", "rollout.use_fixed_worker", "rollout.router.*", "rollout.server.*",
        "runner.early_stop.*", "runner.eval_episodes", "runner.local_update_steps", "runner.log_interval",
        "runner.save_dir", "server.*", "runner.num_data_episodes", "runner.record_task_description",
        "runner.num_success_frames", "runner.num_fail_frames", "runner.fail_success_ratio", "runner.random_seed",
        "runner.val_split", "seed",
    ),
    KINDS,
)  # fmt: skip
OTHER_WORKERS: Table = dict.fromkeys(
    (
        "actor.sync_bucket_capacity", "actor.sync_weight_no_wait", "rollout.rollout_queue_size",
        "rollout.sync_weight_nccl_max_ctas", "rollout.sync_weight_nccl_min_ctas",
        "rollout.validate_weight_first_sync",
    ),
    WORKERS,
)  # fmt: skip
OTHERS: Table = {
    **OTHER_LOSSES,
    **OTHER_KINDS,
    **OTHER_WORKERS,
    "inference.*": ACTOR_COMPUTES,
    "profile_data.*": NoEffect("read by RLinf's toolkit that places workers, and by no run"),
    "router_server_args.*": NoEffect("serves the reward model of reward.use_reward_model, which is not supported yet"),
    "cluster.net_emulation.enabled": Refused("no slow network is emulated", fine=(False, None)),
    "cluster.net_emulation.*": NoEffect("acts with enabled only"),
    "actor.num_gpus": NoEffect("cluster.component_placement says so"),
    "actor.num_steps": NoEffect("RLinf itself does not read it"),
    "actor.debug_nan_checks": NoEffect("gradients that are not finite are always noticed"),
    "actor.pretrained_checkpoint": Refused("weights of Megatron's are named by actor.model.megatron_checkpoint"),
    "actor.use_torch_fsdp2": MEMORY,
    "actor.use_triton": MEMORY,
    "actor.model.load_to_device": MEMORY,
}
"""Rows for both text and embodied runs."""

ONLY_TEXT: Table = {
    "agentloop.*": AGENTS,
    "agentlightning.*": AGENTS,
    "tools.*": AGENTS,
    "rollout_judge.*": AGENTS,
    "eval": Refused("a checkpoint is tested with `tether eval`", fine=(False, None)),
    "actor.combine_reference_model": MEMORY,
    "actor.sync_precision": NoEffect("weights are not sent"),
    "runner.pad_after_pack": MEMORY,
    "rollout.weight_reload": WORKERS,
    "actor.inference_split": MEMORY,
    "actor.lr_sched_sync_with_optim": Checked("steps of actor.optim's schedule are counted by it"),
    "algorithm.entropy_op_type": MEMORY,
    "algorithm.down_sampling.do_down_sampling": Refused("responses are not left out by a rule", fine=(False, None)),
    "algorithm.down_sampling.*": NoEffect("acts with do_down_sampling only"),
    "algorithm.sampling_params.stop": Refused("responses end with the model's own tokens", fine=(None, [])),
    "algorithm.sampling_params.stop_token_ids": Refused("responses end with the model's own tokens", fine=(None, [])),
    "critic.global_batch_size": NoEffect("follows from data.rollout_batch_size and algorithm.n_minibatches"),
}
ONLY_EMBODIED: Table = {
    "env.delay_sampler.*": Refused("no delay of an environment is simulated"),
    "algorithm.ratio_clip_eps": NoEffect("embodied runs read clip_ratio_low and clip_ratio_high"),
    "rollout.gpu_memory_utilization": NoEffect("the policy acts in this process"),
    "rollout.enforce_eager": NoEffect("the policy acts in this process"),
    "rollout.max_new_tokens": NoEffect("actions have as many tokens as the policy says"),
    "rollout.model.model_type": NoEffect("the policy that acts is the one that learns, actor.model.model_type"),
    "actor.model.proprio_dim": NoEffect("the environment's spaces say so"),
    "actor.model.tokenizer_path": NoEffect("the policy reads its instructions itself"),
    "actor.model.embodiment_tag*": NoEffect("read by other policies than tether's"),
    "actor.model.padded_vocab_size": NoEffect("the policy's own tokens"),
}
"""Rows of embodied runs that differ from those of text runs, or that text runs do not have."""
