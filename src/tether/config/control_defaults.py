"""Defaults of embodied runs, in which `env.train.id` is set.

Text and embodied runs share the keys of the algorithm, the update and the trainer. This module has the defaults of
embodied runs, by task, where they differ from verl's for language models. Whether a task has continuous actions follows
from its id, from ``init_params.continuous``, or from the environment itself (`tether.control.build.fit_defaults`),
which also shows whether observations consist of images only.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from tether.config.keys import keys
from tether.config.loading.settings import Setting, Settings
from tether.control.envs.config import SELF_RESETTING
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES

SWITCH = "env.train.id"
SOURCE = "default of embodied runs"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

COMMON: Mapping[str, object] = {
    # The schema requires these keys, but an embodied run has neither prompts nor a language model.
    "data.train_files": (),
    "actor_rollout_ref.model.path": "",
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.95,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": f"${{{ACTOR}.ppo_mini_batch_size}}",
    f"{ACTOR}.ppo_epochs": 4,
    f"{ACTOR}.shuffle": True,
    f"{ACTOR}.clip_ratio_c": None,
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.optim.eps": 1e-5,
    f"{ACTOR}.optim.clip_grad": 0.5,
    f"{ACTOR}.optim.lr_scheduler_type": "linear",
    "critic.optim.lr": f"${{{ACTOR}.optim.lr}}",
    "critic.cliprange_value": None,
    "critic.loss_coef": 0.5,
    "policy.hidden_dim": 64,
    "policy.num_layers": 2,
    # Such small networks are slower on several threads.
    "trainer.num_threads": 1,
    "trainer.project_name": "control",
    "trainer.experiment_name": f"${{{SWITCH}}}",
    "trainer.log_freq": 10,
    "trainer.save_freq": 100,
    "trainer.test_freq": 50,
}
DISCRETE: Mapping[str, object] = {
    "env.train.total_num_envs": 8,
    "env.train.max_steps_per_rollout_epoch": 128,
    f"{ACTOR}.optim.lr": 2.5e-4,
    f"{ACTOR}.entropy_coeff": 0.01,
    "trainer.total_env_steps": 500_000,
}
CONTINUOUS: Mapping[str, object] = {
    "env.train.total_num_envs": 1,
    "env.train.max_steps_per_rollout_epoch": 2048,
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.ppo_epochs": 10,
    f"{ACTOR}.optim.lr": 3e-4,
    "policy.init_logstd": 0.0,
    "policy.normalize_observations": True,
    "policy.normalize_rewards": True,
    "trainer.total_env_steps": 1_000_000,
}
MINIGRID: Mapping[str, object] = {
    **DISCRETE,
    "env.train.total_num_envs": 16,
    # In most tasks the mission text is the same in all episodes.
    "env.train.drop_observations": ("mission",),
    "policy.model_type": "cnn_policy",
    "policy.hidden_dim": 128,
    # The bytes are indices: of objects (up to 10), of colours and of states.
    "policy.pixel_scale": 10.0,
    f"{ACTOR}.optim.lr": 1e-3,
}
VLA: Mapping[str, object] = {
    "policy.hidden_dim": 128,
    "policy.num_layers": 4,
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{ACTOR}.optim.clip_grad": 1.0,
    "critic.optim.lr": 1e-3,
}
FLOW: Mapping[str, object] = {
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{ACTOR}.optim.clip_grad": 1.0,
    "critic.optim.lr": 1e-3,
}
POLICIES: Mapping[str, Mapping[str, object]] = {
    "cnn_policy": {
        "policy.hidden_dim": 512,
        "policy.num_layers": 1,
        "policy.activation": "relu",
        "policy.share_critic": True,
    },
    **dict.fromkeys(VLA_TYPES, VLA),
    **dict.fromkeys(FLOW_TYPES, FLOW),
}
"""``policy.model_type`` -> defaults in addition to `COMMON`; `PRESETS` override them."""
PRESETS: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(
        (
            "Ant-*", "HalfCheetah-*", "Hopper-*", "Humanoid*", "InvertedDoublePendulum-*", "InvertedPendulum-*",
            "Pusher-*", "Reacher-*", "Swimmer-*", "Walker2d-*", "Pendulum-*", "BipedalWalker*", "*Continuous*",
        ),
        CONTINUOUS,
    ),
    "*MiniGrid-*": MINIGRID,
    "*": DISCRETE,
}  # fmt: skip
"""Pattern of ids -> defaults in addition to `COMMON`, close to those of CleanRL's PPO; the first match is used."""


def is_embodied(settings: Settings) -> bool:
    """Whether the settings describe an embodied run."""
    return SWITCH in settings and settings[SWITCH].value is not None


def with_defaults(settings: Settings, *, continuous: bool = False, pictures: bool = False) -> Settings:
    """Return the settings with the defaults of embodied runs, or unchanged for a text run.

    Args:
        settings: the user's settings.
        continuous: whether the environment has continuous actions, whatever its id.
        pictures: whether observations consist of images only.
    """
    if not is_embodied(settings):
        return settings
    preset = CONTINUOUS if continuous or _requests_continuous(settings) else _preset(settings)
    if pictures and "policy.features_extractor" not in settings:
        preset = {**preset, "policy.model_type": "cnn_policy"}
    model = settings["policy.model_type"].value if "policy.model_type" in settings else preset.get("policy.model_type")
    defaults = {**COMMON, **POLICIES.get(str(model), {}), **preset}
    own_settings = {
        path: setting for path, setting in settings.items() if setting.value is not None or not _is_required(path)
    }
    return {key: Setting(value, SOURCE, -1) for key, value in defaults.items()} | own_settings


def _is_required(path: str) -> bool:
    """Whether a text run requires the key, so that null means unset."""
    return path in keys() and keys()[path].required


def is_undecided(settings: Settings) -> bool:
    """Whether the defaults depend on properties of the environment that the settings do not show."""
    if not is_embodied(settings) or _requests_continuous(settings) or _preset(settings) is not DISCRETE:
        return False
    kinds = {key: settings[key].value for key in ("env.train.env_type", "policy.model_type") if key in settings}
    return kinds.get("env.train.env_type", "gymnasium") in ("gymnasium", *SELF_RESETTING) and (
        kinds.get("policy.model_type") not in (*VLA_TYPES, *FLOW_TYPES)
    )


def _preset(settings: Settings) -> Mapping[str, object]:
    name = str(settings[SWITCH].value)
    return next(values for pattern, values in PRESETS.items() if fnmatchcase(name, pattern))


def _requests_continuous(settings: Settings) -> bool:
    arguments = settings["env.train.init_params"].value if "env.train.init_params" in settings else {}
    return isinstance(arguments, Mapping) and arguments.get("continuous") is True
