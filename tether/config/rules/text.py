"""Rules between keys: each looks at a whole config and names one contradiction.

Every message names the keys it speaks of by their full path, so that a rule is left out where one of them is wrong by
itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tether.config.problems import Problem
from tether.config.rules.advantages import ADVANTAGE_RULES
from tether.config.rules.control import RULES as TASK_RULES
from tether.config.rules.networks import NETWORK_RULES
from tether.config.rules.off_policy import OFF_POLICY_RULES
from tether.config.schema.optim import OptimConfig
from tether.config.schema.root import RunConfig
from tether.loss_requirements import REQUIRED_AGGREGATION

Rule = Callable[[RunConfig], Problem | None]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def training_data_is_named(cfg: RunConfig) -> Problem | None:
    """An empty list or name is no file."""
    if cfg.data.train_files and all(cfg.data.train_files):
        return None
    return Problem("data.train_files", "names no file", "give at least one file")


def actor_mini_batch_fits(cfg: RunConfig) -> Problem | None:
    """A mini-batch is a part of the training batch."""
    return _mini_batch_fits(cfg, f"{ACTOR}.ppo_mini_batch_size", cfg.actor_rollout_ref.actor.ppo_mini_batch_size)


def critic_mini_batch_fits(cfg: RunConfig) -> Problem | None:
    """As for the actor; silent where the critic only repeats the actor's value."""
    size = cfg.critic.ppo_mini_batch_size
    if not cfg.critic.enable or size == cfg.actor_rollout_ref.actor.ppo_mini_batch_size:
        return None
    return _mini_batch_fits(cfg, "critic.ppo_mini_batch_size", size)


def _mini_batch_fits(cfg: RunConfig, key: str, size: int) -> Problem | None:
    if size <= cfg.data.train_batch_size:
        return None
    what = f"{size} prompts are more than data.train_batch_size={cfg.data.train_batch_size}"
    return Problem(key, what, f"set it to at most {cfg.data.train_batch_size}")


def policy_loss_is_aggregated_as_defined(cfg: RunConfig) -> Problem | None:
    """A ratio of whole responses has no meaning in a mean over tokens."""
    actor = cfg.actor_rollout_ref.actor
    mode, found = actor.policy_loss.loss_mode, actor.loss_agg_mode
    demanded = REQUIRED_AGGREGATION.get(mode, found)
    if found in (None, demanded):
        return None
    key = f"{ACTOR}.loss_agg_mode"
    what = f"{found} contradicts {ACTOR}.policy_loss.loss_mode={mode}, which is defined for {demanded}"
    return Problem(key, what, f"leave {key} out")


def clip_cov_bounds_enclose_something(cfg: RunConfig) -> Problem | None:
    """clip_cov drops tokens whose covariance lies between the bounds."""
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode != "clip_cov" or loss.clip_cov_lb < loss.clip_cov_ub:
        return None
    section = f"{ACTOR}.policy_loss"
    what = f"{loss.clip_cov_lb} is not below {section}.clip_cov_ub={loss.clip_cov_ub}, so clip_cov drops no token"
    return Problem(f"{section}.clip_cov_lb", what, f"set it below {loss.clip_cov_ub}")


def adaptive_kl_moves(cfg: RunConfig) -> Problem | None:
    """The adaptive controller divides by both of its numbers."""
    control = cfg.algorithm.kl_ctrl
    if control.type != "adaptive" or (control.horizon > 0 and control.target_kl > 0):
        return None
    name = "horizon" if control.horizon <= 0 else "target_kl"
    what = f"{getattr(control, name)} cannot be divided by, as algorithm.kl_ctrl.type=adaptive does"
    return Problem(f"algorithm.kl_ctrl.{name}", what, "set it above 0, or use algorithm.kl_ctrl.type=fixed")


def actor_warmup_is_said_once(cfg: RunConfig) -> Problem | None:
    """Steps and share of steps name one length."""
    return _warmup_is_said_once(ACTOR, cfg.actor_rollout_ref.actor.optim)


def critic_warmup_is_said_once(cfg: RunConfig) -> Problem | None:
    """As for the actor."""
    return _warmup_is_said_once("critic", cfg.critic.optim)


def _warmup_is_said_once(section: str, optim: OptimConfig) -> Problem | None:
    if optim.lr_warmup_steps < 0 or optim.lr_warmup_steps_ratio == 0:
        return None
    steps, ratio = f"{section}.optim.lr_warmup_steps", f"{section}.optim.lr_warmup_steps_ratio"
    what = f"{optim.lr_warmup_steps} and {ratio}={optim.lr_warmup_steps_ratio} give the warm-up twice"
    return Problem(steps, what, f"keep {steps} or {ratio}")


def critic_warmup_has_a_critic(cfg: RunConfig) -> Problem | None:
    """Without a critic nothing would learn in these steps."""
    if cfg.trainer.critic_warmup <= 1 or cfg.critic.enable:
        return None
    what = f"{cfg.trainer.critic_warmup - 1} steps train a critic alone, and critic.enable is False"
    return Problem("trainer.critic_warmup", what, "set trainer.critic_warmup=0")


def critic_warmup_ends(cfg: RunConfig) -> Problem | None:
    """The actor must get its turn."""
    steps = cfg.trainer.total_training_steps
    if steps is None or cfg.trainer.critic_warmup <= steps or not cfg.critic.enable:
        return None
    what = f"{cfg.trainer.critic_warmup} leaves the actor untrained in trainer.total_training_steps={steps}"
    return Problem("trainer.critic_warmup", what, f"set it to at most {steps}: from this step on the actor learns")


def critic_is_there_to_wait_for(cfg: RunConfig) -> Problem | None:
    """Without a critic no variance is ever explained."""
    key = "trainer.critic_warmup_until_explained_variance"
    threshold = cfg.trainer.critic_warmup_until_explained_variance
    if threshold is None or cfg.critic.enable:
        return None
    return Problem(key, f"{threshold} waits for a critic, and critic.enable is False", f"leave {key} out")


def prompt_length_is_one(cfg: RunConfig) -> Problem | None:
    """Data and rollout cut at the same length."""
    return _length_is_one("prompt", cfg.actor_rollout_ref.rollout.prompt_length, cfg.data.max_prompt_length)


def response_length_is_one(cfg: RunConfig) -> Problem | None:
    """As for prompts."""
    return _length_is_one("response", cfg.actor_rollout_ref.rollout.response_length, cfg.data.max_response_length)


def _length_is_one(name: str, rollout: int, data: int) -> Problem | None:
    if rollout == data:
        return None
    key = f"{ROLLOUT}.{name}_length"
    return Problem(key, f"{rollout} contradicts data.max_{name}_length={data}", f"leave {key} out")


def longest_prompt_leaves_room(cfg: RunConfig) -> Problem | None:
    """Responses are cut where prompt and response together reach this length."""
    limit, longest = cfg.actor_rollout_ref.rollout.max_model_len, cfg.data.max_prompt_length
    if limit is None or limit > longest:
        return None
    what = f"{limit} leaves a prompt of data.max_prompt_length={longest} tokens no room for a response"
    return Problem(f"{ROLLOUT}.max_model_len", what, f"set it above {longest}, or lower data.max_prompt_length")


def greedy_validation_answers_once(cfg: RunConfig) -> Problem | None:
    """Greedy answers to one prompt are all the same."""
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    if sampling.n == 1 or sampling.temperature > 0:
        return None
    section = f"{ROLLOUT}.val_kwargs"
    what = f"{sampling.n} greedy answers to a prompt are all the same ({section}.temperature=0)"
    return Problem(f"{section}.n", what, f"set {section}.n=1, or {section}.do_sample=True and {section}.temperature")


def validation_has_data(cfg: RunConfig) -> Problem | None:
    """Asking for validation needs something to validate on."""
    asks = "trainer.val_only" if cfg.trainer.val_only else "trainer.test_freq" if cfg.trainer.test_freq > 0 else None
    if (cfg.data.val_files and all(cfg.data.val_files)) or asks is None:
        return None
    return Problem("data.val_files", f"empty, and {asks} asks for validation", "give data.val_files")


def resume_path_is_given(cfg: RunConfig) -> Problem | None:
    """The mode needs the path, and the path needs the mode."""
    by_path, path = cfg.trainer.resume_mode == "resume_path", cfg.trainer.resume_from_path
    if by_path == (path is not None):
        return None
    if by_path:
        return Problem(
            "trainer.resume_from_path", "missing with trainer.resume_mode=resume_path", "give the checkpoint"
        )
    what = f"{path} is not read with trainer.resume_mode={cfg.trainer.resume_mode}"
    return Problem("trainer.resume_from_path", what, "set trainer.resume_mode=resume_path, or leave the path out")


def checkpoints_are_kept_together(cfg: RunConfig) -> Problem | None:
    """Actor and critic of a step stand in one checkpoint."""
    actor, critic = cfg.trainer.max_actor_ckpt_to_keep, cfg.trainer.max_critic_ckpt_to_keep
    if actor == critic:
        return None
    what = f"{critic} contradicts trainer.max_actor_ckpt_to_keep={actor}; one checkpoint holds both"
    return Problem("trainer.max_critic_ckpt_to_keep", what, "leave trainer.max_critic_ckpt_to_keep out")


def custom_dataset_is_complete(cfg: RunConfig) -> Problem | None:
    """A class needs its file and its name."""
    custom = cfg.data.custom_cls
    if (custom.path is None) == (custom.name is None):
        return None
    missing = "path" if custom.path is None else "name"
    return Problem(f"data.custom_cls.{missing}", "missing beside the other key of data.custom_cls", "give both")


def subsets_are_not_empty(cfg: RunConfig) -> Problem | None:
    """A limit of 0 rows would leave nothing."""
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(cfg.data, name) == 0:
            return Problem(f"data.{name}", "0 leaves no row", "give a number above 0, or -1 for all rows")
    return None


RULES: tuple[Rule, ...] = (
    training_data_is_named,
    actor_mini_batch_fits,
    critic_mini_batch_fits,
    policy_loss_is_aggregated_as_defined,
    clip_cov_bounds_enclose_something,
    adaptive_kl_moves,
    actor_warmup_is_said_once,
    critic_warmup_is_said_once,
    critic_warmup_has_a_critic,
    critic_warmup_ends,
    critic_is_there_to_wait_for,
    prompt_length_is_one,
    response_length_is_one,
    longest_prompt_leaves_room,
    greedy_validation_answers_once,
    validation_has_data,
    resume_path_is_given,
    checkpoints_are_kept_together,
    custom_dataset_is_complete,
    subsets_are_not_empty,
    *ADVANTAGE_RULES,
    *OFF_POLICY_RULES,
)
EMBODIED_RULES: tuple[Rule, ...] = (
    actor_warmup_is_said_once,
    critic_warmup_ends,
    resume_path_is_given,
    checkpoints_are_kept_together,
    policy_loss_is_aggregated_as_defined,
    clip_cov_bounds_enclose_something,
    *TASK_RULES,
    *NETWORK_RULES,
)


def contradictions(cfg: RunConfig) -> list[Problem]:
    """Every contradiction of a config."""
    rules = RULES if cfg.env.train.id is None else EMBODIED_RULES
    return [problem for rule in rules if (problem := rule(cfg)) is not None]
