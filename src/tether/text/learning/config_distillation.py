"""`distillation`: teachers whose distributions the policy learns from on its own samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from tether.config.integrations import section_problem
from tether.config.problems import Problem
from tether.config.schema.algorithm import KlKind
from tether.config.schema.section import (
    ActsIf,
    Inherits,
    Name,
    NonNegative,
    Options,
    Positive,
    PositiveFloat,
    Refuses,
    Says,
    Section,
)
from tether.spelling import did_you_mean

LogProb = Annotated[float, Field(le=0), Says("a number, 0 or below")]
DISTILLS = ActsIf("distillation.enabled", on=(True,))
TOP_K = ActsIf(".loss_mode", on=("forward_kl_topk",))
POLICY_GRADIENT = ActsIf(".use_policy_gradient", on=(True,))


class TeacherConfig(Section):
    """An entry of `distillation.teacher_models`."""

    key: Name | None = None
    """The `data_source` of the rows that it scores; a single teacher scores all rows."""
    model_path: str | None = None
    """Directory or hub id of a model with the policy's tokenizer."""
    server_url: str | None = None
    """Address of a vLLM server that runs it, http://HOST:PORT; null: it runs here. (tether's own, as those below.)"""
    served_model: str | None = None
    """The model's name on the server; null: model_path."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""
    timeout: PositiveFloat = 300.0
    """Timeout in seconds for a row, over all attempts."""
    attempts: Positive = 4
    """Maximum number of requests for a row, if the server is busy or fails."""
    max_concurrent: Positive = 64
    """Maximum number of concurrent requests."""


OF_SERVER = ("served_model", "api_key_env", "timeout", "attempts", "max_concurrent")
TEACHERS = "distillation.teacher_models"
SERVER_SETTINGS = {"inference": (None, {}), "num_replicas": (None, 0)}
"""Settings of verl's teachers that have no effect in tether, with the values that are accepted."""


def _without_empty(value: object) -> object:
    """Return the teachers without settings that tether ignores, and without entries that name no teacher, such as
    verl's default entry."""
    if not isinstance(value, dict):
        return value
    read = {
        str(name): {key: item for key, item in entry.items() if key not in ("_target_", *SERVER_SETTINGS)}
        if isinstance(entry, dict)
        else entry
        for name, entry in value.items()
    }
    return {
        name: entry
        for name, entry in read.items()
        if not isinstance(entry, dict) or any(item is not None for item in entry.values())
    }


def teacher_problems(teachers: Mapping[str, object]) -> list[Problem]:
    """Return the problems of the teachers of a run that uses distillation."""
    problems: list[Problem] = []
    name_of = dict[str, str]()
    if not teachers:
        fix = "give a larger model with the policy's tokenizer"
        return [Problem(f"{TEACHERS}.teacher_model.model_path", "missing with distillation.enabled=True", fix)]
    for name, entry in teachers.items():
        path = f"{TEACHERS}.{name}"
        if not name.replace("-", "_").isidentifier():
            fix = "use letters, digits, _ and -; its KL is logged by its name"
            problems.append(Problem(path, "is not a name", fix))
        elif not isinstance(entry, dict):
            problems.append(Problem(path, f"{entry!r} is not a teacher", "give {key: DATA_SOURCE, model_path: MODEL}"))
        else:
            problems += _problems_of(path, entry, len(teachers))
            if (key := str(entry.get("key"))) in name_of and "key" in entry:
                what = f"{key!r} is the key of {name_of[key]} as well, and a row has one teacher"
                problems.append(Problem(f"{path}.key", what, "give each teacher a data_source of its own"))
            name_of.setdefault(key, name)
    return problems


def _problems_of(path: str, entry: Mapping[str, object], count: int) -> list[Problem]:
    try:
        teacher = TeacherConfig.model_validate(entry)
    except ValidationError as error:
        return [section_problem(path, TeacherConfig, "a teacher", detail) for detail in error.errors()]
    if teacher.model_path is None:
        fix = "give a larger model with the policy's tokenizer"
        return [Problem(f"{path}.model_path", "missing: the teacher has no model", fix)]
    if idle := [name for name in OF_SERVER if name in entry and teacher.server_url is None]:
        what = "is of a teacher on a server, and this one runs here"
        return [Problem(f"{path}.{idle[0]}", what, f"give {path}.server_url, or leave it out")]
    if teacher.key is None and count > 1:
        what = f"missing: with {count} teachers each needs the data_source of the rows that it scores"
        return [Problem(f"{path}.key", what, f"give it, for example {path}.key=openai/gsm8k")]
    return []


def read_teachers(teachers: Mapping[str, object]) -> dict[str, TeacherConfig]:
    """Return the teachers by name, in alphabetical order; they must have no `teacher_problems`."""
    return {name: TeacherConfig.model_validate(teachers[name]) for name in sorted(teachers)}


def teacher_of_source(teachers: Mapping[str, object]) -> dict[str, int]:
    """Return the index of the teacher in `read_teachers` for each data source; empty if one teacher scores all rows."""
    keys = [str(teacher.key) for teacher in read_teachers(teachers).values()]
    return {key: index for index, key in enumerate(keys)} if len(keys) > 1 else {}


def check_has_teacher(sources: Mapping[str, int], data_source: str) -> None:
    """Check that, if there are several teachers, one of them scores rows of this data source.

    Args:
        sources: result of `teacher_of_source`.
        data_source: the data source of a row.

    Raises:
        ValueError: no teacher scores it; the message names the data sources that have a teacher.
    """
    if sources and data_source not in sources:
        raise ValueError(
            f"`data_source` is {data_source!r}, which no teacher scores: {TEACHERS} has teachers of "
            f"{', '.join(map(repr, sources))}. Set the key of one to it, add a teacher, or leave such rows out."
            f"{did_you_mean(data_source, sources)}"
        )


class DistillationLossConfig(Section):
    """`distillation.distillation_loss`: how the policy learns from the teacher."""

    loss_mode: Annotated[
        KlKind | Literal["forward_kl_topk"], Refuses(("full+",), "full already has the exact gradient")
    ] = "k3"
    """KL per token: an estimator of KL(policy, teacher); full, which is exact; or forward_kl_topk."""
    topk: Annotated[Positive, TOP_K] = 32
    """forward_kl_topk: number of the teacher's most probable tokens over which KL(teacher, policy) is computed."""
    log_prob_min_clamp: Annotated[LogProb | None, TOP_K] = None
    """forward_kl_topk: lower bound of the log-probs of both; null: none."""
    loss_max_clamp: PositiveFloat | None = None
    """Maximum absolute value of a token's KL; null: none."""
    use_task_rewards: bool = True
    """Also learn from rewards; False: rewards are only logged."""
    distillation_loss_coef: Annotated[NonNegative, ActsIf(".use_task_rewards", on=(True,))] = 1.0
    """Weight of the distillation loss when it is added to the policy loss."""
    use_policy_gradient: bool = False
    """Use minus a token's KL as its advantage in a clipped policy loss; False: minimise the KL by its gradient."""
    clip_ratio: Annotated[NonNegative, POLICY_GRADIENT] = 0.2
    """Clip range of that policy loss."""
    clip_ratio_low: Annotated[NonNegative, Inherits(".clip_ratio"), POLICY_GRADIENT]
    """Lower side of the clip range. In verl it is 0.2 regardless of clip_ratio."""
    clip_ratio_high: Annotated[NonNegative, Inherits(".clip_ratio"), POLICY_GRADIENT]
    """Upper side of the clip range. In verl it is 0.2 regardless of clip_ratio."""


class DistillationConfig(Section):
    """On-policy distillation: the policy learns to match a teacher on its own samples."""

    enabled: bool = False
    """Load the teachers in place of the reference, with the settings of actor_rollout_ref.ref."""
    teacher_models: Annotated[Options, BeforeValidator(_without_empty), DISTILLS]
    """Teachers by name: {teacher_model: {model_path: ...}}; of several, each has its data_source as key."""
    distillation_loss: Annotated[DistillationLossConfig, DISTILLS]
