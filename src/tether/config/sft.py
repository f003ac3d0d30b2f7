"""Supervised fine-tuning, enabled by `sft.enable`: its defaults, and the keys that it reads.

The keys are those of verl's SFT trainer, except that validation and checkpoints are configured as in PPO.
"""

from __future__ import annotations

from collections.abc import Mapping

from tether.config.loading.settings import Setting, Settings

SWITCH = "sft.enable"
SOURCE = "default of fine-tuning"
ACTOR = "actor_rollout_ref.actor"

DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 256,
    f"{ACTOR}.ppo_mini_batch_size": "${data.train_batch_size}",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ACTOR}.optim.lr": 1e-5,
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    "trainer.total_epochs": 4,
    "trainer.experiment_name": "sft",
}
READ = (
    "sft.", "data.", "actor_rollout_ref.model.", "actor_rollout_ref.nccl_timeout", "trainer.", "cluster.",
    "ray_kwargs.", "integrations",
    *(f"{ACTOR}.{name}" for name in ("ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "optim.",
                                     "loss_agg_mode", "loss_scale_factor", "strategy", "fsdp_config.",
                                     "ulysses_sequence_parallel_size")),
)  # fmt: skip
"""Prefixes of the keys that fine-tuning reads."""
UNREAD = (
    "actor_rollout_ref.model.lora.",
    *(f"data.{name}" for name in ("max_prompt_length", "max_response_length", "gen_batch_size", "answer_key",
                                  "reward_fn_key", "data_source", "control_tokens_as_text", "custom_cls.")),
    *(f"trainer.{name}" for name in ("critic_warmup", "async_mode", "rollout_data_dir", "record_mb")),
)  # fmt: skip
"""Prefixes of keys in `READ` that only PPO reads."""


def is_read(path: str) -> bool:
    """Whether fine-tuning reads a key."""
    return path.startswith(READ) and not path.startswith(UNREAD)


def with_defaults(settings: Settings) -> Settings:
    """Return the settings with the defaults of fine-tuning, or unchanged for other runs."""
    if SWITCH not in settings or settings[SWITCH].value is not True:
        return settings
    return {key: Setting(value, SOURCE, -1) for key, value in DEFAULTS.items()} | settings
