"""Whether a run uses a KL from the reference, in the loss or the reward, and how it is computed.

With distillation the reference is the teacher, or one model per teacher.
"""

from __future__ import annotations

from tether.config.schema.root import RunConfig
from tether.text.learning.config_distillation import TEACHERS, TeacherConfig, read_teachers

OVER_VOCABULARY = ("full", "forward_kl_topk")
"""Kinds of KL that compare full distributions instead of the probabilities of sampled tokens."""


def kl_in_loss(cfg: RunConfig) -> str | None:
    """Return the kind of the KL in the loss, or None."""
    if cfg.distillation.enabled:
        return cfg.distillation.distillation_loss.loss_mode
    actor = cfg.actor_rollout_ref.actor
    return actor.kl_loss_type if actor.use_kl_loss else None


def full_kl_in_loss(cfg: RunConfig) -> bool:
    """Whether the loss has a KL of full distributions."""
    return kl_in_loss(cfg) in OVER_VOCABULARY


def full_kl_in_reward(cfg: RunConfig) -> bool:
    """Whether the reward has a KL of full distributions."""
    return cfg.algorithm.use_kl_in_reward and cfg.algorithm.kl_penalty == "full"


def full_kl_setting(cfg: RunConfig) -> tuple[str, str]:
    """Return the key that enables a KL of full distributions, and its value."""
    kind = kl_in_loss(cfg)
    if kind is None or kind not in OVER_VOCABULARY:
        return "algorithm.kl_penalty", cfg.algorithm.kl_penalty
    distills = cfg.distillation.enabled
    return "distillation.distillation_loss.loss_mode" if distills else "actor_rollout_ref.actor.kl_loss_type", kind


def reference_models(cfg: RunConfig) -> dict[str, tuple[str, str]]:
    """Return, by the name of its component, the key that configures each model of the reference, and the key's value.

    There is one model, ``reference``, or one for each teacher, in the order of `TrainBatch.teacher`.
    """
    if not cfg.distillation.enabled:
        return {"reference": ("actor_rollout_ref.model.path", cfg.actor_rollout_ref.model.path)}
    teachers = read_teachers(cfg.distillation.teacher_models)
    named = {name: (f"{TEACHERS}.{name}.model_path", str(teacher.model_path)) for name, teacher in teachers.items()}
    if len(named) == 1:
        return {"reference": named.popitem()[1]}
    return {f"teacher {name}": setting for name, setting in named.items()}


def served_teachers(cfg: RunConfig) -> dict[str, TeacherConfig]:
    """Return the teachers on servers, by the names of `reference_models`; other models run on the run's own devices."""
    if not cfg.distillation.enabled:
        return {}
    teachers = read_teachers(cfg.distillation.teacher_models).values()
    named = zip(reference_models(cfg), teachers, strict=True)
    return {name: teacher for name, teacher in named if teacher.server_url is not None}


def local_references(cfg: RunConfig) -> list[str]:
    """Return the names of the reference's models that run on the run's own devices."""
    served = served_teachers(cfg)
    return [name for name in reference_models(cfg) if name not in served]


def has_reference(cfg: RunConfig) -> bool:
    """Whether the run computes a KL from the reference."""
    return cfg.algorithm.use_kl_in_reward or kl_in_loss(cfg) is not None


def reference_is_policy(cfg: RunConfig) -> bool:
    """Whether the reference is the policy with its adapter disabled."""
    return cfg.actor_rollout_ref.model.lora_rank > 0 and not cfg.distillation.enabled


def reference_runs_with_actor(cfg: RunConfig) -> bool:
    """Whether the actor's engine also runs the reference, to compare distributions within each micro-batch."""
    return full_kl_in_loss(cfg) or full_kl_in_reward(cfg)


def asks_reference(cfg: RunConfig) -> bool:
    """Whether the KL is estimated from the reference's log-probs of the sampled tokens."""
    in_reward = cfg.algorithm.use_kl_in_reward and not full_kl_in_reward(cfg)
    return in_reward or (kl_in_loss(cfg) is not None and not full_kl_in_loss(cfg))
