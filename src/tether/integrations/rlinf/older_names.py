"""Older names of keys and values in RLinf's files, which are read as their current names, with a note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tether.control.policies.config import VLA_TYPES
from tether.integrations.rlinf.rows import (
    UNSET,
    Checked,
    Convert,
    NoEffect,
    NotRead,
    Refused,
    Table,
    Unsupported,
    Values,
    positive_int,
    to,
)

Task = Literal["embodied", "reasoning"]
TASK_KEY = "runner.task_type"
LOSS_KEY = "algorithm.loss_type"
_RENAMED: Mapping[str, str] = {
    "rollout.model_dir": "rollout.model.model_path",
    "rollout.model_arch": "rollout.model.model_type",
    "rollout.precision": "rollout.model.precision",
    "actor.model.model_name": "actor.model.model_type",
    "algorithm.shuffle_samples": "algorithm.shuffle_rollout",
    "algorithm.auto_reset": "env.train.auto_reset",
    "algorithm.ignore_terminations": "env.train.ignore_terminations",
    "algorithm.use_fixed_reset_state_ids": "env.train.use_fixed_reset_state_ids",
    "algorithm.max_episode_steps": "env.train.max_episode_steps",
    "env.train.simulator_type": "env.train.env_type",
    "env.eval.simulator_type": "env.eval.env_type",
}
RENAMED: Mapping[Task, Mapping[str, str]] = {
    "embodied": {
        **_RENAMED,
        "actor.checkpoint_load_path": "actor.model.model_path",
        "rollout.unnorm_key": "actor.model.unnorm_key",
    },
    "reasoning": _RENAMED,
}
"""Older name -> current key, which takes precedence if a file has both."""
VALUES: Mapping[Task, Mapping[str, Mapping[str, str]]] = {
    "embodied": {
        "algorithm.adv_type": {"embodied_gae": "gae", "embodied_grpo": "grpo", "ppo": "gae"},
        LOSS_KEY: {"embodied_ppo": "actor_critic", "ppo": "actor_critic", "embodied_grpo": "actor", "grpo": "actor"},
    },
    "reasoning": {
        TASK_KEY: {"math": "reasoning"},
        "algorithm.adv_type": {"math_grpo": "grpo"},
        # Text runs with these names had no critic.
        LOSS_KEY: {"grpo": "actor", "ppo": "actor", "math_ppo_actor": "actor"},
    },
}
"""Key -> older name of a value -> its current name."""
NETWORKS_OWN = NoEffect("the network's own configuration says so")
UNREAD = NoEffect("read by nothing in RLinf")
SERVER = NoEffect("the native engine samples in this process, so there is no inference server to set up")
DEVICES = NoEffect("devices are counted by trainer.n_gpus_per_node, beside the file")
UNSHARDED = NoEffect("on one device there are no shards to place")
STEPS = "env.train.max_steps_per_rollout_epoch"


@dataclass(frozen=True)
class Older:
    """The older names in a file."""

    keys: Mapping[str, str]
    """Current key -> its name in the file."""
    values: Mapping[str, object]
    """Current key -> its value in the file."""

    def named(self, values: Values) -> dict[str, str]:
        """Return each older name, or older KEY=VALUE, with the current one."""
        return {old: new for new, old in self.keys.items()} | {
            f"{key}={value}": f"{key}={values[key]}" for key, value in self.values.items()
        }


def with_current_names(values: Values, task: Task) -> tuple[dict[str, object], Older]:
    """Replace older names by the current ones.

    An older key is not renamed if the file also has its successor.
    """
    renamed = {old: new for old, new in RENAMED[task].items() if old in values and new not in values}
    current = {renamed.get(key, key): value for key, value in values.items()}
    older = {key: current[key] for key, names in VALUES[task].items() if str(current.get(key)) in names}
    current |= {key: VALUES[task][key][str(value)] for key, value in older.items()}
    return current, Older({new: old for old, new in renamed.items()}, older)


def rollout_steps(value: object, values: Values) -> object:
    """Return the steps of a rollout, which older files count in chunks of actions."""
    chunks = positive_int(values, "algorithm.n_chunk_steps", 1) * positive_int(
        values, "actor.model.num_action_chunks", 1
    )
    return values.get(STEPS, chunks)


def value_position(value: object, values: Values) -> object:
    """Refuse another position of OpenVLA's value head than the first token; other policies do not read the key."""
    if values.get("actor.model.model_type") not in VLA_TYPES:
        raise NotRead("read with OpenVLA and OpenVLA-OFT only")
    if value not in ("a0", None):
        raise Unsupported("values are read before the first token of an action", fix="leave it out, or set a0")
    return UNSET


def _environments(role: str) -> Convert:
    """Return the conversion of `num_envs`: older files count environments per process and stage, so the total is
    required."""
    total = f"env.{role}.total_num_envs"

    def convert(value: object, values: Values) -> object:
        if values.get(total) is None:
            raise Unsupported(f"it counts the environments of each process and stage; set {total}")
        return values[total]

    return convert


def _older_env(role: str) -> Table:
    section, total = f"env.{role}", NoEffect(f"follows from env.{role}.total_num_envs and group_size")
    return {
        f"{section}.num_envs": to(f"{section}.total_num_envs", by=_environments(role)),
        f"{section}.num_group": total,
        f"{section}.num_task": total,
        f"{section}.only_eval": NoEffect("the section says so"),
        f"{section}.policy_setup": NoEffect("actor.model.policy_setup is read"),
    }


SUPERSEDED: Table = {old: Checked(f"older name of {new}, which is read") for old, new in RENAMED["embodied"].items()}
"""Older names in files that have both."""
OLDER_EMBODIED: Table = {
    **SUPERSEDED,
    **_older_env("train"),
    **_older_env("eval"),
    "algorithm.n_chunk_steps": to(STEPS, by=rollout_steps),
    "algorithm.n_eval_chunk_steps": NoEffect("a test counts whole episodes"),
    "algorithm.obs_mode": NoEffect("acts through the presets that name it, as env.train.init_params.obs_mode"),
    "algorithm.num_group_envs": NoEffect("acts through the presets that name it, as env.train.num_envs"),
    "algorithm.use_ordered_reset_state_ids": NoEffect("acts through the presets that name it"),
    "algorithm.specific_reset_id": Refused("episodes begin in states that the seed draws"),
    "actor.checkpoint_save_path": NoEffect("checkpoints are in the folder of the run, which runner.logger names"),
    "actor.model.sharding_strategy": UNSHARDED,
    "actor.model.ckpt_path": Refused(
        "weights out of a .pt file are not supported; give a checkpoint as runner.resume_dir"
    ),
    "actor.model.vh_mode": to("policy.model_type", by=value_position),
    "actor.model.add_bias_linear": NETWORKS_OWN,
    "actor.model.add_qkv_bias": NETWORKS_OWN,
    "algorithm.require_values": NoEffect("algorithm.adv_type decides whether there is a critic"),
    "cluster.num_gpus_per_node": DEVICES,
    **dict.fromkeys(
        (
            "actor.model.do_sample",
            "actor.model.micro_batch_size",
            "actor.model.val_micro_batch_size",
            "actor.model.name",
            "actor.model.noise_level",
            "actor.model.temperature",
            "actor.model.top_k",
            "actor.model.top_p",
        ),
        UNREAD,
    ),
    "actor.fsdp.*": UNSHARDED,
    "actor.optim.warmup_style": Refused("RLinf reads actor.optim.lr_scheduler in its place", fine=("constant", None)),
}
OLDER_TEXT: Table = {
    **{old: SUPERSEDED[old] for old in _RENAMED if old.startswith("rollout.")},
    "actor.checkpoint_load_path": Refused("weights out of Megatron's files are not read; name the model's directory"),
    "actor.checkpoint_save_path": NoEffect("checkpoints are in the folder of the run"),
    "algorithm.sampling_params.use_greedy": Refused("training needs samples, not greedy answers", fine=(False, None)),
    "algorithm.use_critic": Checked("older name of critic.use_critic_model, which is read"),
    "rollout.attention_backend": SERVER,
    "rollout.sglang_decode_log_interval": SERVER,
    "rollout.torch_compile_max_bs": SERVER,
    "rollout.use_torch_compile": SERVER,
    "cluster.num_gpus_per_node": DEVICES,
    "actor.model.sharding_strategy": UNSHARDED,
    "reward.len_reward_penalty": Refused("responses are not scored by their length"),
    "reward.safe_length": NoEffect("acts with len_reward_penalty only"),
    "reward.max_length": NoEffect("acts with len_reward_penalty only"),
    "algorithm.use_value_loss": Checked("critic.use_critic_model says whether there is a critic"),
}
