"""Keys of `data` and `reward` that RLinf reads only for types of data and rewards that tether does not support.

`data.type` and `reward.reward_type` select these types; their own rows refuse them.
"""

from __future__ import annotations

from tether.integrations.rlinf.rows import NoEffect, Table

OTHER_ROWS: Table = dict.fromkeys(
    (
        "data.action_dim", "data.action_horizon", "data.advantage_tag", "data.apply_chat_template_kwargs",
        "data.assets.*", "data.balance_dataset_weights", "data.balance_weights", "data.choice_key", "data.create.*",
        "data.data_root", "data.dataset_init_kwargs.*", "data.dataset_path", "data.dataset_type", "data.do_augment",
        "data.enable_zh", "data.eval_data_paths", "data.eval_num_workers", "data.gamma", "data.image_keys",
        "data.is_hybrid", "data.is_markdown", "data.lazy_load", "data.lazy_loading", "data.macro_stride",
        "data.max_response_length", "data.model_type", "data.multi_anchor_resample_attempts", "data.norm_column",
        "data.normalize_to_minus_one_zero", "data.parquet_cache_size", "data.persistent_workers", "data.pin_memory",
        "data.prefetch_factor", "data.repo_id", "data.return_max", "data.return_min", "data.robot_type",
        "data.sampling_mode", "data.solution_key", "data.system_prompt", "data.tag", "data.task_name",
        "data.train_num_workers", "data.transform_on_gpu", "data.unique_columns", "data.use_chat_template",
        "data.video_backend", "data.video_in_chunk_offsets", "data.video_tolerance_s",
    ),
    NoEffect("read for other rows (pictures, robots, tables), which data.type or runner.task_type names"),
)  # fmt: skip
OTHER_RULES: Table = {
    **dict.fromkeys(
        (
            "reward.compute_score_timeout", "reward.default_score_on_timeout", "reward.max_workers",
            "reward.random_print_percent", "reward.reward_weights.*",
        ),
        NoEffect("read by other rules, which reward.reward_type names"),
    ),
    **dict.fromkeys(
        (
            "reward.enable_offload", "reward.env_reward_weight", "reward.history_reward_assign", "reward.model.*",
            "reward.reward_mode", "reward.reward_threshold", "reward.reward_weight", "reward.standalone_realworld.*",
            "reward.use_reward_prob", "reward.worker_type",
        ),
        NoEffect("acts with reward.use_reward_model only, which is refused"),
    ),
}  # fmt: skip
