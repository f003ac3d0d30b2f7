"""Rules that the configuration of a control run must satisfy; rules of networks are in ``policies/config_rules.py``."""

from __future__ import annotations

from tether.config.control_defaults import ACTOR
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, multiple
from tether.config.rules.shared import SHARED_RULES
from tether.config.schema.algorithm import COMPARES_RESPONSES
from tether.config.schema.root import RunConfig
from tether.control.envs.config import SELF_RESETTING, EvalEnvConfig, TrainEnvConfig
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES
from tether.control.policies.config_rules import NETWORK_RULES
from tether.loss_requirements import REQUIRED_AGGREGATION

TRAIN, EVAL = "env.train", "env.eval"
LARGE = ("cnn_policy", *VLA_TYPES, *FLOW_TYPES)
CONTROL_ESTIMATORS = (
    "gae", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "opo", "gpg", "raw",
)  # fmt: skip
"""Estimators that work without a language model."""


def mini_batch_fits_rollout(cfg: RunConfig) -> Problem | None:
    """A mini-batch must not be larger than the rollout."""
    train, size = cfg.env.train, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = train.total_num_envs * train.max_steps_per_rollout_epoch * train.rollout_epoch
    samples = steps // cfg.policy.num_action_chunks
    if size <= samples:
        return None
    what = f"{size} samples are more than the {samples} of a rollout (environments x steps, {TRAIN})"
    return Problem(f"{ACTOR}.ppo_mini_batch_size", what, f"set it to at most {samples}")


def ignored_terminations_end(cfg: RunConfig) -> Problem | None:
    """Ignoring terminations requires a time limit, since nothing else would end an episode."""
    for role, env in ((TRAIN, cfg.env.train), (EVAL, cfg.env.eval)):
        if env.ignore_terminations and env.max_episode_steps is None:
            what = f"True leaves episodes without an end, since {role}.max_episode_steps is null"
            return Problem(f"{role}.ignore_terminations", what, f"set {role}.max_episode_steps")
    return None


def loss_has_no_second_sampler(cfg: RunConfig) -> Problem | None:
    """Bypass mode corrects for a separate sampler, but here the trained policy itself acts."""
    if cfg.actor_rollout_ref.actor.policy_loss.loss_mode != "bypass_mode":
        return None
    what = "bypass_mode corrects for a sampler of other probabilities, which embodied runs do not have"
    return Problem(f"{ACTOR}.policy_loss.loss_mode", what, "use vanilla, which is the same here")


def loss_fits_densities(cfg: RunConfig) -> Problem | None:
    """Losses that bound differences of probabilities do not apply to densities of continuous actions."""
    mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode not in ("dppo_tv", "dppo_kl"):
        return None
    what = f"{mode} compares the probabilities of tokens; embodied runs have densities of actions"
    return Problem(f"{ACTOR}.policy_loss.loss_mode", what, "use vanilla, which compares ratios")


def device_pays(cfg: RunConfig) -> Problem | None:
    """Only large networks are faster on a device other than the CPU."""
    if cfg.trainer.device in ("auto", "cpu") or cfg.policy.model_type in LARGE:
        return None
    what = f"{cfg.trainer.device} is for {', '.join(LARGE)}: smaller networks are faster on the CPU"
    return Problem("trainer.device", what, "leave it out")


def devices_are_named(cfg: RunConfig) -> Problem | None:
    """With several devices, their kind must be set; a single device defaults to the CPU."""
    if cfg.trainer.devices == 1 or cfg.trainer.device != "auto":
        return None
    what = f"auto does not say what the {cfg.trainer.devices} devices are"
    return Problem("trainer.device", what, "set cpu; or cuda, for large networks")


def devices_have_environments(cfg: RunConfig) -> Problem | None:
    """Each device needs at least one complete group of environments."""
    train, devices = cfg.env.train, cfg.trainer.devices
    groups = train.total_num_envs // train.group_size
    if devices <= groups:
        return None
    what = (
        f"{train.total_num_envs} in groups of {train.group_size} ({TRAIN}.group_size) are {groups} groups, fewer than "
    )
    return Problem(
        f"{TRAIN}.total_num_envs",
        f"{what}the {devices} devices (trainer.n_gpus_per_node x trainer.nnodes), each of which steps some",
        f"set it to at least {devices * train.group_size}",
    )


def rollouts_ahead_begin_episodes(cfg: RunConfig) -> Problem | None:
    """Asynchronous sampling requires one device, and rollouts that begin new episodes."""
    mode, key = cfg.trainer.async_mode, "trainer.async_mode"
    if mode == "off":
        return None
    if cfg.env.train.auto_reset:
        what = f"True lets episodes go on in the next rollout, and with {key}={mode} each begins its own"
        return Problem(f"{TRAIN}.auto_reset", what, f"set {TRAIN}.auto_reset=False, or {key}=off")
    if cfg.trainer.devices > 1:
        return Problem(key, f"{mode} samples in this process, and there are {cfg.trainer.devices} devices", "use off")
    return None


def estimator_fits_episodes(cfg: RunConfig) -> Problem | None:
    """Estimators without a critic require complete episodes that begin with the rollout."""
    estimator, train, key = cfg.algorithm.adv_estimator, cfg.env.train, "algorithm.adv_estimator"
    if estimator not in CONTROL_ESTIMATORS:
        return Problem(
            key, f"{estimator} needs what only language models have", "use one of " + ", ".join(CONTROL_ESTIMATORS)
        )
    if estimator == "gae":
        return None
    if train.auto_reset:
        what = f"True cuts episodes where a rollout ends, and {key}={estimator} scores whole ones"
        return Problem(f"{TRAIN}.auto_reset", what, f"set {TRAIN}.auto_reset=False")
    if estimator in COMPARES_RESPONSES and train.group_size == 1:
        what = f"1 episode a start state carries no signal for {key}={estimator}, which compares episodes"
        return Problem(f"{TRAIN}.group_size", what, "set it to 2 or more, or use gae")
    return None


def critic_exists(cfg: RunConfig) -> Problem | None:
    """Only gae has a critic."""
    estimator, trainer = cfg.algorithm.adv_estimator, cfg.trainer
    if estimator == "gae":
        return None
    requests = {
        "policy.share_critic": cfg.policy.share_critic,
        "trainer.critic_warmup": trainer.critic_warmup > 1,
        "trainer.critic_warmup_until_explained_variance": cfg.trainer.critic_warmup_until_explained_variance
        is not None,
    }
    key = next((key for key, is_requested in requests.items() if is_requested), None)
    if key is None:
        return None
    return Problem(key, f"there is no critic with algorithm.adv_estimator={estimator}", "leave it out")


def critic_has_layers(cfg: RunConfig) -> Problem | None:
    """Sizes of the critic apply only if it has its own network."""
    policy = cfg.policy
    for key, size in (("critic_hidden_dim", policy.hidden_dim), ("critic_num_layers", policy.num_layers)):
        if policy.share_critic and getattr(policy, key) != size:
            what = f"{getattr(policy, key)}, but with policy.share_critic the critic has no hidden layers of its own"
            return Problem(f"policy.{key}", what, "leave it out, or set policy.share_critic=False")
    return None


def levels_fit(cfg: RunConfig) -> Problem | None:
    """Log-probs per chunk require rewards per chunk, so that each probability ratio has one advantage."""
    algorithm, chunk = cfg.algorithm, cfg.policy.num_action_chunks
    if chunk == 1 or algorithm.logprob_type != "chunk_level" or algorithm.reward_type == "chunk_level":
        return None
    what = f"chunk_level is one ratio for {chunk} advantages (algorithm.reward_type=action_level)"
    return Problem("algorithm.logprob_type", what, "set algorithm.reward_type=chunk_level, or use action_level")


def policy_loss_is_aggregated_as_defined(cfg: RunConfig) -> Problem | None:
    """A loss with sequence-level ratios requires its own aggregation."""
    actor = cfg.actor_rollout_ref.actor
    mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    demanded = REQUIRED_AGGREGATION.get(mode, aggregation)
    if aggregation in (None, demanded):
        return None
    key = f"{ACTOR}.loss_agg_mode"
    what = f"{aggregation} contradicts {ACTOR}.policy_loss.loss_mode={mode}, which is defined for {demanded}"
    return Problem(key, what, f"leave {key} out")


def episodes_can_weigh_alike(cfg: RunConfig) -> Problem | None:
    """Weighting by episode length requires episodes that begin with the rollout, whose length is known."""
    actor, key = cfg.actor_rollout_ref.actor, f"{ACTOR}.loss_agg_mode"
    if actor.loss_agg_mode != "masked_mean_ratio" or not cfg.env.train.auto_reset:
        return None
    what = f"masked_mean_ratio weighs whole episodes, which {TRAIN}.auto_reset=True cuts where a rollout ends"
    return Problem(key, what, f"set {TRAIN}.auto_reset=False, or use token-mean")


def filter_bounds_enclose_something(cfg: RunConfig) -> Problem | None:
    """Filtering groups by reward requires complete episodes, and a lower bound that is not above the upper one."""
    algorithm = cfg.algorithm
    if not algorithm.filter_rewards:
        return None
    if cfg.env.train.auto_reset:
        what = f"True judges whole episodes, which {TRAIN}.auto_reset=True cuts where a rollout ends"
        return Problem("algorithm.filter_rewards", what, f"set {TRAIN}.auto_reset=False")
    low, high = algorithm.rewards_lower_bound, algorithm.rewards_upper_bound
    if low <= high:
        return None
    what = f"{low} is above algorithm.rewards_upper_bound={high}, so nothing is learned from"
    return Problem("algorithm.rewards_lower_bound", what, f"set it to at most {high}")


def waiting_environments_are_gymnasiums(cfg: RunConfig) -> Problem | None:
    """Environments that reset themselves cannot wait for the end of a chunk or a rollout, nor choose a start state."""
    train = cfg.env.train
    chunk = cfg.policy.num_action_chunks > 1 and "policy.num_action_chunks"
    fixed = train.use_fixed_reset_state_ids and f"{TRAIN}.use_fixed_reset_state_ids"
    group = train.group_size > 1 and f"{TRAIN}.group_size"
    why = chunk or fixed or group or (not train.auto_reset and f"{TRAIN}.auto_reset")
    sections: tuple[tuple[str, TrainEnvConfig | EvalEnvConfig, str | bool], ...] = (
        (TRAIN, train, why),
        (EVAL, cfg.env.eval, chunk),
    )
    for role, section, reason in sections:
        if reason and section.env_type in SELF_RESETTING:
            what = f"{section.env_type} begins episodes by itself, which {reason} does not allow"
            return Problem(f"{role}.env_type", what, "use gymnasium")
        if reason and section.vectorization == "vector":
            what = f"vector begins episodes by itself, which {reason} does not allow"
            return Problem(f"{role}.vectorization", what, "use auto, sync or subprocess")
    return None


def workers_are_read(cfg: RunConfig) -> Problem | None:
    """A number of workers applies only to environments that are stepped in threads or subprocesses."""
    for role, section in ((TRAIN, cfg.env.train), (EVAL, cfg.env.eval)):
        threads = section.env_type == "envpool" or section.vectorization == "subprocess"
        if section.num_workers is not None and not threads:
            what = f"{section.num_workers} workers, but {role}.vectorization={section.vectorization} has none"
            return Problem(f"{role}.num_workers", what, f"set {role}.vectorization=subprocess, or leave it out")
    return None


def videos_are_rendered_here(cfg: RunConfig) -> Problem | None:
    """Videos require environments that are stepped one by one, because others do not render."""
    test = cfg.env.eval
    if not test.video_cfg.save_video:
        return None
    if test.env_type not in SELF_RESETTING and test.vectorization != "vector":
        return None
    key = "env_type" if test.env_type in SELF_RESETTING else "vectorization"
    what = f"{getattr(test, key)} shows no pictures for {EVAL}.video_cfg.save_video"
    fix = "use sync" if key == "vectorization" else f"use gymnasium, with the same task as {EVAL}.id, if it has it"
    return Problem(f"{EVAL}.{key}", what, fix)


RULES: tuple[Rule, ...] = (
    *SHARED_RULES,
    device_pays,
    devices_are_named,
    devices_have_environments,
    loss_has_no_second_sampler,
    loss_fits_densities,
    rollouts_ahead_begin_episodes,
    estimator_fits_episodes,
    critic_exists,
    critic_has_layers,
    levels_fit,
    policy_loss_is_aggregated_as_defined,
    episodes_can_weigh_alike,
    filter_bounds_enclose_something,
    multiple(f"{TRAIN}.max_steps_per_rollout_epoch", "policy.num_action_chunks"),
    multiple(f"{TRAIN}.total_num_envs", f"{TRAIN}.group_size"),
    mini_batch_fits_rollout,
    ignored_terminations_end,
    waiting_environments_are_gymnasiums,
    workers_are_read,
    videos_are_rendered_here,
    *NETWORK_RULES,
)
