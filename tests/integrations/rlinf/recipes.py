"""The keys of RLinf's ten PPO recipes with an MLP policy, and the presets that they are mounted on.

A recipe is a nested mapping: what its file says besides what all ten share. Values are facts of those files.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

Tree = Mapping[str, Any]
VIDEO = {"save_video": False, "info_on_video": True, "video_base_dir": "${runner.logger.log_path}/video/train"}
EPISODES = {"seed": 0, "total_num_envs": None, "group_size": 1, "ignore_terminations": False, "video_cfg": VIDEO}
RELATIVE = {"use_rel_reward": True, "reward_coef": 1.0, "is_eval": False}

PRESETS: Mapping[str, Tree] = {
    "env/maniskill_pick_cube": {
        **EPISODES,
        **{"env_type": "maniskill", "auto_reset": False, "use_rel_reward": False, "reward_mode": "raw"},
        **{"wrap_obs_mode": "simple", "use_full_state": False, "use_fixed_reset_state_ids": False},
        **{"max_steps_per_rollout_epoch": 50, "max_episode_steps": 50, "enable_offload": False},
        "init_params": {
            **{"id": "PickCube-v1", "num_envs": None, "obs_mode": "state", "sim_backend": "gpu", "render_mode": "all"},
            "control_mode": "None",
            **{"sim_config": {"sim_freq": 100, "control_freq": 20}, "max_episode_steps": "${..max_episode_steps}"},
        },
    },
    "env/frankasim_pickcube_state": {
        **EPISODES,
        **RELATIVE,
        **{"env_type": "frankasim", "gym_id": "PandaPickCube-v0", "auto_reset": True, "obs_mode": "state"},
        **{"obs_format": "tensor", "state_key": "state", "render": False},
        **{"max_steps_per_rollout_epoch": 200, "max_episode_steps": 200},
    },
    "env/genesis_cubepick": {
        **EPISODES,
        **RELATIVE,
        **{"env_type": "genesis", "auto_reset": True, "use_fixed_reset_state_ids": False},
        **{"max_steps_per_rollout_epoch": 200, "max_episode_steps": 200},
        "init_params": {"task_name": "cube_pick", "dt": 0.01, "substeps": 4, "backend": "cuda", "precision": "32"},
    },
    "env/embodichain_cart_pole": {
        **EPISODES,
        **{"env_type": "embodichain", "auto_reset": True, "gym_config_path": "gym_config.json", "headless": True},
        **{"enable_rt": False, "sim_device": "cpu", "state_keys": ["qpos", "qvel", "qf"]},
        **{"max_steps_per_rollout_epoch": 128, "max_episode_steps": 500, "use_rel_reward": False, "reward_coef": 1.0},
        "is_eval": False,
    },
    "model/mlp_policy": {
        **{"model_type": "mlp_policy", "model_path": "", "policy_setup": "panda-qpos", "obs_dim": 42, "action_dim": 8},
        **{"num_action_chunks": 1, "hidden_dim": 256, "precision": "32", "add_value_head": True, "is_lora": False},
        "lora_rank": 32,
    },
    "hybrid_engines/fsdp": {
        **{"strategy": "fsdp2", "sharding_strategy": "full_shard", "gradient_checkpointing": False, "fsdp_size": -1},
        **{"cpu_offload": False, "reshard_after_forward": True, "use_orig_params": False, "use_liger_kernel": False},
        "mixed_precision": {"param_dtype": None, "reduce_dtype": None, "buffer_dtype": None},
        "amp_autocast": {"enabled": False, "precision": "bf16"},
        "grad_scaler": {"enabled": False},
    },
    "weight_syncer/patch_syncer": {"type": "patch", "snapshot_device": "cpu", "init_sync": {"enabled": True}},
}

SHARED: Tree = {
    "hydra": {"run": {"dir": "."}, "output_subdir": None, "searchpath": ["file://${oc.env:EMBODIED_PATH}/config/"]},
    "cluster": {"num_nodes": 1, "component_placement": {"actor,env,rollout": 0}},
    "runner": {
        **{"task_type": "embodied", "max_epochs": 1000, "max_steps": -1, "only_eval": False, "resume_dir": None},
        **{"val_check_interval": 50, "save_interval": -1, "ckpt_path": None},
        "logger": {
            **{"log_path": "../results", "project_name": "rlinf", "experiment_name": "mlp"},
            "logger_backends": ["tensorboard"],
        },
    },
    "algorithm": {
        **{"update_epoch": 8, "normalize_advantages": True, "group_size": 1, "adv_type": "gae"},
        **{"reward_type": "action_level", "logprob_type": "action_level", "entropy_type": "action_level"},
        **{"loss_type": "actor_critic", "loss_agg_func": "token-mean", "kl_penalty": "kl", "kl_beta": 0.0},
        **{"entropy_bonus": 0, "clip_ratio_high": 0.2, "clip_ratio_low": 0.2, "clip_ratio_c": 3.0},
        **{"value_clip": 1.0, "huber_delta": 10.0, "gamma": 0.99, "gae_lambda": 0.95},
    },
    "env": {"group_name": "EnvGroup"},
    "rollout": {
        **{"group_name": "RolloutGroup", "backend": "huggingface", "enable_offload": False, "pipeline_stage_num": 1},
        **{"enable_torch_compile": True, "enable_cuda_graph": True},
        "model": {"model_path": "", "precision": "${actor.model.precision}"},
    },
    "actor": {
        **{"group_name": "ActorGroup", "training_backend": "fsdp", "seed": 1234, "enable_offload": False},
        **{"micro_batch_size": 6400, "global_batch_size": 6400},
        "model": {"model_type": "mlp_policy", "model_path": ""},
        "optim": {
            **{"lr": 3e-4, "value_lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8},
            **{"weight_decay": 0.01, "clip_grad": 0.5},
        },
        "fsdp_config": {
            **{"strategy": "fsdp", "sharding_strategy": "no_shard"},
            "mixed_precision": dict.fromkeys(
                ("param_dtype", "reduce_dtype", "buffer_dtype"), "${actor.model.precision}"
            ),
        },
    },
    "reward": {"use_reward_model": False},
    "critic": {"use_critic_model": False},
}

FIFTY = {"rollout_epoch": 1, "max_episode_steps": 50, "max_steps_per_rollout_epoch": 50, "auto_reset": True}
PICK_CUBE: Tree = {
    "algorithm": {"gamma": 0.8, "gae_lambda": 0.9, "bootstrap_type": "always"},
    "env": {
        "train": {**FIFTY, "total_num_envs": 1024, "use_fixed_reset_state_ids": False},
        "eval": {
            **FIFTY,
            **{"total_num_envs": 32, "ignore_terminations": True, "use_fixed_reset_state_ids": True, "group_size": 1},
            "video_cfg": {"save_video": True, "video_base_dir": "${runner.logger.log_path}/video/eval"},
        },
    },
}
CAMERAS = {"sensor_configs": {"shader_pack": "default", "width": 224, "height": 224}}
THREE_VIEWS = {
    **{"use_3rd_view_as_extra": True, "use_full_state": True},
    "init_params": {**CAMERAS, "id": "PickCube3View-v1", "obs_mode": "rgb"},
}
COLLECTION = {"data_collection": {"enabled": True, "save_dir": "data", "export_format": "pickle", "only_success": True}}
VLM: Tree = {
    "cluster": {"component_placement": {"reward": "0-0"}},
    "runner": {"max_steps": 1000, "val_check_interval": -1, "per_worker_log": False, "weight_sync_interval": 1},
    "algorithm": {"update_epoch": 4, "gamma": 0.99},
    "data": {"rollout_batch_size": 32},
    "env": {"train": {**THREE_VIEWS, "total_num_envs": 32}, "eval": THREE_VIEWS},
    "actor": {"micro_batch_size": 1600, "global_batch_size": 1600, "optim": {"lr": 1e-4, "value_lr": 1e-4}},
    "reward": {
        **{"use_reward_model": True, "group_name": "RewardGroup", "reward_mode": "history_buffer"},
        **{"reward_weight": 1.0, "env_reward_weight": 0.0, "history_reward_assign": True},
        "model": {"model_path": "Qwen3-VL-4B-Instruct", "model_type": "buffered_vlm", "precision": "bf16"},
    },
}
LEGACY: Tree = {
    "runner": {"max_epochs": 200, "seq_length": 1, "max_prompt_length": 1},
    "algorithm": {
        **{"rollout_epoch": 1, "eval_rollout_epoch": 1, "reward_coef": 1.0},
        "sampling_params": {"do_sample": True, "temperature_train": 1.0, "temperature_eval": 0.6, "top_k": 0},
        "length_params": {"max_new_token": 1, "max_length": 1, "min_length": 1},
    },
    "env": {
        "train": {"group_size": "${algorithm.group_size}", "reward_coef": "${algorithm.reward_coef}", "is_eval": False},
        "eval": {"group_size": "${algorithm.group_size}", "reward_coef": "${algorithm.reward_coef}", "is_eval": True},
    },
}
ARM: Tree = {
    "env": {
        "train": {"total_num_envs": 128, "use_rel_reward": True, "video_cfg": {"save_video": True}},
        "eval": {"total_num_envs": 16, "use_rel_reward": True, "video_cfg": {"save_video": True}},
    },
    "actor": {"micro_batch_size": 256, "global_batch_size": 256, "model": {"num_action_chunks": 1, "hidden_dim": 256}},
}
CART_POLE: Tree = {
    "cluster": {"component_placement": {"actor,env,rollout": "0-3"}},
    "runner": {"max_epochs": 1000, "val_check_interval": 100},
    "env": {
        "train": {"total_num_envs": 256, "max_steps_per_rollout_epoch": 64, "max_episode_steps": 500},
        "eval": {"total_num_envs": 8, "max_steps_per_rollout_epoch": 64, "max_episode_steps": 500},
    },
    "actor": {
        **{"micro_batch_size": 64, "global_batch_size": 256, "model": {"obs_dim": 6, "action_dim": 2}},
        "optim": {"lr": 1e-4, "value_lr": 1e-4, "weight_decay": 0.0},
    },
}

CUBE = "maniskill_pick_cube"
SIMULATOR = {"env.train.env_type", "env.eval.env_type"}
LEARNED = {"reward.use_reward_model"}

RECIPES: Mapping[str, tuple[str, tuple[Tree, ...], set[str]]] = {
    "maniskill_ppo_mlp": (CUBE, (PICK_CUBE,), set()),
    "maniskill_async_ppo_mlp": (
        CUBE,
        (PICK_CUBE, {"algorithm": {"loss_type": "decoupled_actor_critic"}}),
        set(),
    ),
    "maniskill_ppo_mlp_collect": (
        CUBE,
        (PICK_CUBE, {"env": {"train": {"wrap_obs_mode": "simple", "init_params": CAMERAS}, "eval": COLLECTION}}),
        set(),
    ),
    "maniskill_ppo_mlp_resnet_reward": (
        CUBE,
        (
            PICK_CUBE,
            {
                "cluster": {"component_placement": {"reward": "0-1"}},
                "env": {"train": {"reward_render_mode": "always", "init_params": CAMERAS}},
                "reward": {"use_reward_model": True, "mode": "replace", "resnet": {"image_size": [3, 224, 224]}},
            },
        ),
        LEARNED,
    ),
    "maniskill_ppo_mlp_vlm_trend_reward": (CUBE, (PICK_CUBE, VLM), LEARNED),
    "maniskill_ppo_mlp_vlm_trend_reward_collect": (
        CUBE,
        (PICK_CUBE, VLM, {"algorithm": {"gamma": 0.8, "update_epoch": 8}, "env": {"eval": COLLECTION}}),
        LEARNED,
    ),
    "maniskill_ppo_mlp_vlm_trend_reward_sglang": (
        CUBE,
        (PICK_CUBE, VLM, {"reward": {"worker_type": "api"}}),
        LEARNED,
    ),
    "frankasim_ppo_mlp": (
        "frankasim_pickcube_state",
        (LEGACY, ARM),
        SIMULATOR,
    ),
    "genesis_cubepick_ppo_mlp": (
        "genesis_cubepick",
        (LEGACY, ARM, {"actor": {"fsdp_config": {"amp": {"enabled": False, "precision": "bf16"}}}}),
        SIMULATOR,
    ),
    "embodichain_ppo_cart_pole": ("embodichain_cart_pole", (LEGACY, CART_POLE), SIMULATOR),
}
"""Recipe -> the preset of its simulator, its keys over `SHARED`, and the keys that are not supported."""


@cache
def text_of_preset(name: str) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(PRESETS[name])))


@cache
def text_of_recipe(name: str) -> str:
    env, trees, _ = RECIPES[name]
    mounts = [f"env/{env}@env.train", f"env/{env}@env.eval", "model/mlp_policy@actor.model"]
    mounts += ["hybrid_engines/fsdp@actor.fsdp_config", "weight_syncer/patch_syncer@weight_syncer"]
    defaults = [*mounts, {"override hydra/job_logging": "stdout"}]
    return OmegaConf.to_yaml(OmegaConf.merge({"defaults": defaults}, SHARED, *trees))


def write_recipe(folder: Path, name: str) -> Path:
    """Write a recipe and all presets into a folder; returns the recipe's file."""
    for preset in PRESETS:
        (folder / preset).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{preset}.yaml").write_text(text_of_preset(preset))
    (folder / f"{name}.yaml").write_text(text_of_recipe(name))
    return folder / f"{name}.yaml"
