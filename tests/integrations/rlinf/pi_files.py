"""RLinf's PPO files of pi0 and pi0.5 in LIBERO and MetaWorld, each as what it says besides what all of them share.

Values are facts of those files and of the presets that they mount.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

Tree = Mapping[str, Any]
SHARED: Tree = {
    "runner": {
        "task_type": "embodied", "max_epochs": 1000, "max_steps": -1, "val_check_interval": -1, "save_interval": 40,
        "logger": {"log_path": "results", "experiment_name": "run", "logger_backends": ["tensorboard"]},
    },
    "algorithm": {
        "normalize_advantages": True, "group_size": 1, "adv_type": "gae", "loss_type": "actor_critic",
        "reward_type": "chunk_level", "logprob_type": "chunk_level", "entropy_type": "token_level", "update_epoch": 4,
        "loss_agg_func": "token-mean", "entropy_bonus": 0, "clip_ratio_high": 0.2, "clip_ratio_low": 0.2,
        "clip_ratio_c": 3.0, "value_clip": 0.2, "huber_delta": 10.0, "gamma": 0.99, "gae_lambda": 0.95,
        "kl_penalty": "kl", "kl_beta": 0.0, "filter_rewards": False, "rewards_lower_bound": 0.1,
        "rewards_upper_bound": 0.9, "reward_coef": 1.0,
    },
    "env": {
        "train": {
            "auto_reset": False, "ignore_terminations": False, "use_rel_reward": True, "reward_coef": 1.0, "seed": 0,
            "group_size": 1, "use_ordered_reset_state_ids": False, "is_eval": False, "rollout_epoch": 8,
            "total_num_envs": 64, "video_cfg": {"save_video": True, "info_on_video": True},
        },
        "eval": {
            "rollout_epoch": 1, "auto_reset": True, "ignore_terminations": True, "group_size": 1, "seed": 0,
            "total_num_envs": 500, "use_rel_reward": True, "reward_coef": 1.0, "use_fixed_reset_state_ids": True,
            "video_cfg": {"save_video": True, "video_base_dir": "${runner.logger.log_path}/video/eval"},
        },
    },
    "actor": {
        "training_backend": "fsdp", "micro_batch_size": 128, "global_batch_size": 2048, "seed": 42,
        "model": {
            "model_type": "openpi", "model_path": "/path/to/model", "precision": None, "num_action_chunks": 5,
            "action_dim": 7, "is_lora": False, "lora_rank": 32, "use_proprio": True, "add_value_head": True,
            "openpi": {
                "num_images_in_input": 2, "noise_level": 0.5, "noise_method": "flow_sde", "train_expert_only": True,
                "action_chunk": "${actor.model.num_action_chunks}", "num_steps": "${actor.model.num_steps}",
                "action_env_dim": "${actor.model.action_dim}", "use_dsrl": False,
            },
        },
        "optim": {
            "lr": 5.0e-6, "value_lr": 1.0e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1.0e-8,
            "weight_decay": 0.01, "clip_grad": 1.0, "critic_warmup_steps": 0,
        },
        "fsdp_config": {"mixed_precision": {"param_dtype": "${actor.model.precision}"}},
    },
    "rollout": {"backend": "huggingface", "recompute_logprobs": False, "model": {"precision": None}},
    "reward": {"use_reward_model": False},
    "critic": {"use_critic_model": False},
}  # fmt: skip
PI0: Tree = {"actor": {"model": {"num_steps": 4, "openpi": {"config_name": "pi0_libero", "detach_critic_input": True}}}}
PI05: Tree = {
    "actor": {
        "model": {
            "num_steps": 5,
            "openpi": {
                "config_name": "pi05_libero", "detach_critic_input": None, "value_after_vlm": True,
                "value_vlm_mode": "mean_token",
            },
        }
    }
}  # fmt: skip


def _both(**section: Any) -> Tree:
    return {"env": {"train": section, "eval": section}}


def _libero(suite: str, steps: int) -> tuple[Tree, ...]:
    common = {
        "env_type": "libero", "task_suite_name": suite, "reset_gripper_open": True, "specific_reset_id": None,
        "use_step_penalty": False, "use_fixed_reset_state_ids": True, "max_episode_steps": steps,
        "max_steps_per_rollout_epoch": steps, "init_params": {"camera_heights": 256, "camera_widths": 256},
    }  # fmt: skip
    return _both(**common), {"env": {"eval": {"is_eval": True}}}


def _metaworld(train: str, test: str, test_steps: int = 100) -> tuple[Tree, ...]:
    common = {
        "env_type": "metaworld", "max_episode_steps": 100, "max_steps_per_rollout_epoch": 100,
        "init_params": {"camera_heights": 480, "camera_widths": 480},
    }  # fmt: skip
    of_test = {"task_suite_name": test, "max_episode_steps": test_steps, "max_steps_per_rollout_epoch": test_steps}
    return (
        _both(**common),
        {"env": {"train": {"task_suite_name": train, "use_fixed_reset_state_ids": False}, "eval": of_test}},
        {"actor": {"model": {"action_dim": 4, "openpi": {"num_images_in_input": 1}}}},
    )


def _openpi(**section: Any) -> Tree:
    return {"actor": {"model": {"openpi": section}}}


def _asynchronous(staleness: int, threshold: float, **algorithm: Any) -> Tree:
    own = {"loss_type": "decoupled_actor_critic", "staleness_threshold": staleness, "update_epoch": 2, **algorithm}
    train = {"rollout_epoch": 1, "total_num_envs": 128}
    return {"algorithm": {**own, "behave_weight_threshold": threshold}, "env": {"train": train}}


QUICK: Tree = {"env": {"train": {"rollout_epoch": 2, "total_num_envs": 32}}, "actor": {"global_batch_size": 256}}
COSINE: Tree = {"actor": {"optim": {"lr_scheduler": "cosine", "total_training_steps": 1000, "min_lr_rate": 0.1}}}
FILES: Mapping[str, tuple[Tree, ...]] = {
    "libero_10_ppo_openpi": (PI0, *_libero("libero_10", 480)),
    "libero_10_ppo_openpi_pi05": (PI05, *_libero("libero_10", 480), COSINE),
    "libero_goal_ppo_openpi": (PI0, *_libero("libero_goal", 320)),
    "libero_goal_ppo_openpi_pi05": (PI05, *_libero("libero_goal", 320), _openpi(noise_level=0.3)),
    "libero_object_ppo_openpi": (PI0, *_libero("libero_object", 240)),
    "libero_object_ppo_openpi_pi05": (PI05, *_libero("libero_object", 240)),
    "libero_spatial_ppo_openpi": (PI0, *_libero("libero_spatial", 240)),
    "libero_spatial_ppo_openpi_pi05": (PI05, *_libero("libero_spatial", 240)),
    "libero_spatial_ppo_openpi_quickstart": (PI0, *_libero("libero_spatial", 240), QUICK),
    "libero_spatial_async_ppo_openpi_pi05": (
        PI05, *_libero("libero_spatial", 240), _asynchronous(1, 2.0), {"actor": {"model": {"num_steps": 3}}},
    ),
    "libero_object_async_ppo_openpi_pi05": (
        PI05, *_libero("libero_object", 240), _asynchronous(2, 5), _openpi(noise_level=0.3),
        {"actor": {"optim": {"critic_warmup_steps": 30}}},
    ),
    "metaworld_45_ppo_openpi": (
        PI0, *_metaworld("metaworld_45_ind", "metaworld_45_ood", 160), _openpi(config_name="pi0_metaworld"),
    ),
    "metaworld_50_ppo_openpi": (
        PI0, *_metaworld("metaworld_50", "metaworld_50"), _openpi(config_name="pi0_metaworld"),
    ),
    "metaworld_50_ppo_openpi_pi05": (
        PI05, *_metaworld("metaworld_50", "metaworld_50"), _openpi(config_name="pi05_metaworld"),
    ),
}  # fmt: skip
"""Files that import whole."""
REUSED = (PI0, *_libero("libero_spatial", 240), _asynchronous(2, 5, rollout_store_size_per_rank=2))
"""`libero_spatial_async_ppo_openpi`, which keeps two rollouts and learns from each several times."""


def text_of(trees: tuple[Tree, ...]) -> str:
    """Return a file as YAML."""
    return OmegaConf.to_yaml(OmegaConf.merge(SHARED, *trees))
