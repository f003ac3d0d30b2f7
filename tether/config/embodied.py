"""Embodied runs (`env.train.id` is set): their defaults, the keys that they read, and the rules between them.

Text and embodied runs share the keys of the algorithm, the update and the trainer. Where an embodied run needs another
default than verl's for a language model, it stands here, by task, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from tether.config.given import Given, Setting
from tether.config.problems import Problem
from tether.config.schema.root import RunConfig

SWITCH = "env.train.id"
SOURCE = "default of embodied runs"
ACTOR = "actor_rollout_ref.actor"

COMMON: Mapping[str, Any] = {
    # An embodied run has no prompts and no language model; the schema asks every run to name them.
    "data.train_files": (),
    "actor_rollout_ref.model.path": "",
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.95,
    f"{ACTOR}.ppo_mini_batch_size": 256,
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
DISCRETE: Mapping[str, Any] = {
    "env.train.total_num_envs": 8,
    "env.train.max_steps_per_rollout_epoch": 128,
    f"{ACTOR}.optim.lr": 2.5e-4,
    f"{ACTOR}.entropy_coeff": 0.01,
    "trainer.total_env_steps": 500_000,
}
CONTINUOUS: Mapping[str, Any] = {
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
PRESETS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "Ant-*", "HalfCheetah-*", "Hopper-*", "Humanoid*", "InvertedDoublePendulum-*", "InvertedPendulum-*",
            "Pusher-*", "Reacher-*", "Swimmer-*", "Walker2d-*", "Pendulum-*", "BipedalWalker*", "*Continuous*",
        ),
        CONTINUOUS,
    ),
    "*": DISCRETE,
}  # fmt: skip
"""Pattern of ids -> defaults beside `COMMON` (close to those of CleanRL's PPO); the first that fits counts."""

READS = (
    "env.*", "policy.*",
    "algorithm.gamma", "algorithm.lam", "algorithm.adv_estimator", "algorithm.normalize_advantages",
    "algorithm.bootstrap_type", "algorithm.reward_type", "algorithm.logprob_type", "algorithm.entropy_type",
    f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ACTOR}.shuffle", f"{ACTOR}.clip_ratio*",
    f"{ACTOR}.entropy_coeff", f"{ACTOR}.target_kl", f"{ACTOR}.grad_clip", f"{ACTOR}.optim.*",
    f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.tau_*",
    "critic.cliprange_value", "critic.huber_delta", "critic.loss_coef", "critic.optim.lr",
    "trainer.total_training_steps", "trainer.total_env_steps", "trainer.seed", "trainer.project_name",
    "trainer.experiment_name", "trainer.logger", "trainer.log_freq", "trainer.default_local_dir", "trainer.save_freq",
    "trainer.max_*_ckpt_to_keep", "trainer.resume_*", "trainer.test_freq",
    "trainer.device", "trainer.num_threads", "trainer.critic_warmup*",
)  # fmt: skip
"""Keys, or patterns of keys, that an embodied run reads."""


STEP_LOSSES = ("vanilla", "cispo", "gpg", "sapo")


def is_embodied(given: Given) -> bool:
    """Whether what the user gave describes an embodied run."""
    return SWITCH in given and given[SWITCH].value is not None


def with_defaults(given: Given) -> Given:
    """What the user gave, over the defaults of embodied runs where it is one."""
    if not is_embodied(given):
        return given
    name = str(given[SWITCH].value)
    preset = next(values for pattern, values in PRESETS.items() if fnmatchcase(name, pattern))
    return {key: Setting(value, SOURCE, -1) for key, value in {**COMMON, **preset}.items()} | given


def reads(path: str) -> bool:
    """Whether an embodied run reads this key."""
    return any(fnmatchcase(path, pattern) for pattern in READS)


def rollout_fits_chunks(cfg: RunConfig) -> Problem | None:
    """A rollout is a whole number of action chunks."""
    steps, chunk = cfg.env.train.max_steps_per_rollout_epoch, cfg.policy.num_action_chunks
    if steps % chunk == 0:
        return None
    what = f"{steps} steps are no whole number of chunks (policy.num_action_chunks={chunk})"
    return Problem("env.train.max_steps_per_rollout_epoch", what, f"set it to {steps // chunk * chunk or chunk}")


def groups_fit_envs(cfg: RunConfig) -> Problem | None:
    """Environments are dealt to groups evenly."""
    count, size = cfg.env.train.total_num_envs, cfg.env.train.group_size
    if count % size == 0:
        return None
    what = f"{count} environments cannot be dealt to groups of env.train.group_size={size}"
    return Problem("env.train.total_num_envs", what, f"set it to a multiple of {size}")


def mini_batch_fits_rollout(cfg: RunConfig) -> Problem | None:
    """A mini-batch is a part of the rollout."""
    train, size = cfg.env.train, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = train.total_num_envs * train.max_steps_per_rollout_epoch * train.rollout_epoch
    samples = steps // cfg.policy.num_action_chunks
    if size <= samples:
        return None
    what = f"{size} samples are more than the {samples} of a rollout (environments x steps, env.train)"
    return Problem(f"{ACTOR}.ppo_mini_batch_size", what, f"set it to at most {samples}")


def ignored_terminations_end(cfg: RunConfig) -> Problem | None:
    """Without terminations only a time limit ends an episode."""
    for role, env in (("train", cfg.env.train), ("eval", cfg.env.eval)):
        if env.ignore_terminations and env.max_episode_steps is None:
            what = f"True leaves episodes without an end, since env.{role}.max_episode_steps is null"
            return Problem(f"env.{role}.ignore_terminations", what, f"set env.{role}.max_episode_steps")
    return None


def loss_looks_at_one_step(cfg: RunConfig) -> Problem | None:
    """The other losses compare the tokens of a response, or need a second sampler."""
    mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode in STEP_LOSSES:
        return None
    what = f"{mode} is not for embodied runs, whose samples are single steps"
    return Problem(f"{ACTOR}.policy_loss.loss_mode", what, "use one of " + ", ".join(STEP_LOSSES))


def device_is_a_cpu(cfg: RunConfig) -> Problem | None:
    """Environments and networks of a control policy share the host's memory."""
    if cfg.trainer.device in ("auto", "cpu"):
        return None
    what = f"{cfg.trainer.device} is not for embodied runs so far: networks this small are faster on the CPU"
    return Problem("trainer.device", what, "leave it out")


def advantages_come_from_gae(cfg: RunConfig) -> Problem | None:
    """Groups of responses do not exist here."""
    estimator = cfg.algorithm.adv_estimator
    if estimator == "gae":
        return None
    return Problem("algorithm.adv_estimator", f"{estimator} is not for embodied runs so far", "leave it out: gae")


RULES = (
    device_is_a_cpu,
    loss_looks_at_one_step,
    advantages_come_from_gae,
    rollout_fits_chunks,
    groups_fit_envs,
    mini_batch_fits_rollout,
    ignored_terminations_end,
)
