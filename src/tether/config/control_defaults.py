"""Embodied runs (`env.train.id` is set): their defaults.

Text and embodied runs share the keys of the algorithm, the update and the trainer. Where an embodied run needs another
default than verl's for a language model, it stands here, by task, once. What kind of actions a task takes is known by
its id, by ``init_params.continuous``, or else when it is made (`tether.assembly.control.fit_defaults`). Whether all
that it shows is pictures is looked up then, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from tether.config.keys import keys
from tether.config.loading.given import Given, Setting
from tether.config.schema.env import FLOW_TYPES, VLA_TYPES

SWITCH = "env.train.id"
SOURCE = "default of embodied runs"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

COMMON: Mapping[str, object] = {
    # An embodied run has no prompts and no language model; the schema asks every run to name them.
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
    # Networks this small are slower on several threads.
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
    # A text that is the same in all episodes of most tasks.
    "env.train.drop_observations": ("mission",),
    "policy.model_type": "cnn_policy",
    "policy.hidden_dim": 128,
    # The bytes are numbers of objects, up to 10, of colours and of states.
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
"""``policy.model_type`` -> defaults beside `COMMON`; those of `PRESETS` go before."""
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
"""Pattern of ids -> defaults beside `COMMON` (close to those of CleanRL's PPO); the first that fits counts."""


def is_embodied(given: Given) -> bool:
    """Whether what the user gave describes an embodied run."""
    return SWITCH in given and given[SWITCH].value is not None


def with_defaults(given: Given, *, continuous: bool = False, pictures: bool = False) -> Given:
    """The given values over the defaults of embodied runs, where the run is one.

    Args:
        given: by the user.
        continuous: the actions of the environment are numbers, whatever its id is.
        pictures: all of an observation is pictures.
    """
    if not is_embodied(given):
        return given
    preset = CONTINUOUS if continuous or _says_continuous(given) else _preset(given)
    if pictures and "policy.features_extractor" not in given:
        preset = {**preset, "policy.model_type": "cnn_policy"}
    model = given["policy.model_type"].value if "policy.model_type" in given else preset.get("policy.model_type")
    defaults = {**COMMON, **POLICIES.get(str(model), {}), **preset}
    own = {path: setting for path, setting in given.items() if setting.value is not None or not _is_required(path)}
    return {key: Setting(value, SOURCE, -1) for key, value in defaults.items()} | own


def _is_required(path: str) -> bool:
    """Whether a text run has to give the key, so that null is as good as nothing."""
    return path in keys() and keys()[path].required


def is_undecided(given: Given) -> bool:
    """Whether only the environment itself can tell which defaults fit it."""
    if not is_embodied(given) or _says_continuous(given) or _preset(given) is not DISCRETE:
        return False
    kinds = {key: given[key].value for key in ("env.train.env_type", "policy.model_type") if key in given}
    return kinds.get("env.train.env_type", "gymnasium") in ("gymnasium", "envpool") and (
        kinds.get("policy.model_type") not in (*VLA_TYPES, *FLOW_TYPES)
    )


def _preset(given: Given) -> Mapping[str, object]:
    name = str(given[SWITCH].value)
    return next(values for pattern, values in PRESETS.items() if fnmatchcase(name, pattern))


def _says_continuous(given: Given) -> bool:
    arguments = given["env.train.init_params"].value if "env.train.init_params" in given else {}
    return isinstance(arguments, Mapping) and arguments.get("continuous") is True
