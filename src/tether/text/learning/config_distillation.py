"""`distillation`: a teacher, which the policy learns to follow on its own samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tether.config.schema.algorithm import KlKind
from tether.config.schema.section import (
    ActsIf,
    Inherits,
    NonNegative,
    Positive,
    PositiveFloat,
    Refuses,
    Says,
    Section,
)

LogProb = Annotated[float, Field(le=0), Says("a number, 0 or below")]
DISTILLS = ActsIf("distillation.enabled", on=(True,))
TOP_K = ActsIf(".loss_mode", on=("forward_kl_topk",))
POLICY_GRADIENT = ActsIf(".use_policy_gradient", on=(True,))


class TeacherConfig(Section):
    """`distillation.teacher_models.teacher_model`: the teacher."""

    model_path: str | None = None
    """Directory or hub id of a model with the policy's tokenizer."""


class TeacherModelsConfig(Section):
    """`distillation.teacher_models`: one teacher."""

    teacher_model: TeacherConfig


class DistillationLossConfig(Section):
    """`distillation.distillation_loss`: how the policy learns from the teacher."""

    loss_mode: Annotated[
        KlKind | Literal["forward_kl_topk"], Refuses(("full+",), "full already has the exact gradient")
    ] = "k3"
    """KL of a token: an estimator of KL(policy, teacher); full, which is exact; or forward_kl_topk."""
    topk: Annotated[Positive, TOP_K] = 32
    """forward_kl_topk: KL(teacher, policy) over so many of the teacher's most probable tokens."""
    log_prob_min_clamp: Annotated[LogProb | None, TOP_K] = None
    """forward_kl_topk: lower bound of the log-probs of both; null: none."""
    loss_max_clamp: PositiveFloat | None = None
    """Bound of a token's KL, in absolute value; null: none."""
    use_task_rewards: bool = True
    """Learn from rewards as well; False: they are only measured."""
    distillation_loss_coef: Annotated[NonNegative, ActsIf(".use_task_rewards", on=(True,))] = 1.0
    """Weight of the distillation loss beside the policy loss."""
    use_policy_gradient: bool = False
    """Take minus a token's KL as its advantage in a clipped policy loss; False: follow the gradient of the KL."""
    clip_ratio: Annotated[NonNegative, POLICY_GRADIENT] = 0.2
    """Clip range of that policy loss."""
    clip_ratio_low: Annotated[NonNegative, Inherits(".clip_ratio"), POLICY_GRADIENT]
    """Lower side of the clip range. In verl it is 0.2 whatever clip_ratio says."""
    clip_ratio_high: Annotated[NonNegative, Inherits(".clip_ratio"), POLICY_GRADIENT]
    """Upper side of the clip range. In verl it is 0.2 whatever clip_ratio says."""


class DistillationConfig(Section):
    """On-policy distillation: the policy learns to follow a teacher on its own samples."""

    enabled: bool = False
    """Load the teacher in place of the reference, with the settings of actor_rollout_ref.ref."""
    teacher_models: Annotated[TeacherModelsConfig, DISTILLS]
    distillation_loss: Annotated[DistillationLossConfig, DISTILLS]
