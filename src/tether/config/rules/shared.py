"""Rules that apply to both text and embodied runs: of the trainer, the policy update, and adapters."""

from __future__ import annotations

from tether.config.keys import values_of
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, same, set_once
from tether.config.schema.root import RunConfig

ACTOR = "actor_rollout_ref.actor"


def clip_cov_bounds_enclose_something(cfg: RunConfig) -> Problem | None:
    """clip_cov requires a lower bound below the upper bound, since it drops tokens with a covariance in between."""
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode != "clip_cov" or loss.clip_cov_lb < loss.clip_cov_ub:
        return None
    section = f"{ACTOR}.policy_loss"
    what = f"{loss.clip_cov_lb} is not below {section}.clip_cov_ub={loss.clip_cov_ub}, so clip_cov drops no token"
    return Problem(f"{section}.clip_cov_lb", what, f"set it below {loss.clip_cov_ub}")


def critic_warmup_ends(cfg: RunConfig) -> Problem | None:
    """The policy must start to learn before the run ends."""
    steps = cfg.trainer.total_training_steps
    if steps is None or cfg.trainer.critic_warmup <= steps or not cfg.critic.enable:
        return None
    what = f"{cfg.trainer.critic_warmup} leaves the actor untrained in trainer.total_training_steps={steps}"
    return Problem("trainer.critic_warmup", what, f"set it to at most {steps}: from this step on the actor learns")


def a_rollback_has_checkpoints(cfg: RunConfig) -> Problem | None:
    """A rollback requires a checkpoint."""
    if cfg.trainer.on_collapse != "rollback" or cfg.trainer.save_freq > 0:
        return None
    what = f"rollback goes back to a checkpoint, and trainer.save_freq={cfg.trainer.save_freq} saves none"
    return Problem("trainer.on_collapse", what, "set trainer.save_freq above 0")


def resume_path_is_given(cfg: RunConfig) -> Problem | None:
    """Resuming by path requires the path."""
    if cfg.trainer.resume_mode != "resume_path" or cfg.trainer.resume_from_path is not None:
        return None
    return Problem("trainer.resume_from_path", "missing with trainer.resume_mode=resume_path", "give the checkpoint")


def adapters_have_a_scale(section: str) -> Rule:
    """Adapters with scale 0 learn nothing, and a scale without adapters has no effect."""

    def rule(cfg: RunConfig) -> Problem | None:
        values = values_of(cfg)
        rank, key = values[f"{section}.lora_rank"], f"{section}.lora_alpha"
        if rank == 0 or values[key] > 0:
            return None
        what = f"0 multiplies the adapters of {section}.lora_rank={rank} by nothing"
        return Problem(key, what, f"set {key} above 0, such as 16")

    return rule


ACTOR_WARMUP = set_once(f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio")
KEPT_TOGETHER = same("trainer.max_critic_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep")
"""Actor and critic are saved in one checkpoint."""


SHARED_RULES: tuple[Rule, ...] = (
    clip_cov_bounds_enclose_something,
    ACTOR_WARMUP,
    critic_warmup_ends,
    *(adapters_have_a_scale(f"{role}.model") for role in ("actor_rollout_ref", "critic")),
    resume_path_is_given,
    a_rollback_has_checkpoints,
    KEPT_TOGETHER,
)
