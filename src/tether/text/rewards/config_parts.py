"""Sections of `reward_model.parts`: rewards that the user names, whose weighted sum is the score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from tether.config.integrations import section_problem
from tether.config.problems import Problem
from tether.config.schema.section import Options, Positive, PositiveFloat, Section, Strings
from tether.integrations import installed
from tether.spelling import did_you_mean

KEY = "reward_model.parts"


def _as_range(value: object) -> object:
    bounds = list(value) if isinstance(value, list | tuple) else []
    if len(bounds) != 2 or not all(type(bound) in (int, float) for bound in bounds) or bounds[0] >= bounds[1]:
        raise ValueError("a range is [least, greatest], such as [0, 10]")
    return tuple(bounds)


Range = Annotated[tuple[float, float], BeforeValidator(_as_range)]


class AnyPart(Section):
    """Fields of every part."""

    weight: float = 1.0
    """Weight of its score; with 0 the score is only logged."""
    optional: bool = False
    """Whether the other parts score a response from which this one abstains; otherwise such a response has no score."""
    data_sources: Strings | None = None
    """Data sources of the rows that it scores; null for all."""


class RulesPart(AnyPart):
    """The reward of a run without parts: custom_reward_function, otherwise the rule for the row's data_source."""

    kind: Literal["rules"]


class FunctionPart(AnyPart):
    """A user's function, called like custom_reward_function."""

    kind: Literal["function"]
    path: str
    name: str = "compute_score"
    reward_kwargs: Options


class ModelPart(AnyPart):
    """The learned reward model of `reward_model.model`."""

    kind: Literal["model"]


class JudgePart(AnyPart):
    """A language model that reads the response and returns a score."""

    kind: Literal["judge"]
    base_url: str | None = None
    """URL of an endpoint with OpenAI's API, such as https://HOST/v1."""
    path: str | None = None
    """Directory or hub id of a model that tether runs itself, as an alternative to base_url."""
    model: str | None = None
    """Name of the model at the endpoint."""
    prompt: str
    """Template with {prompt} and {response}, and optionally {ground_truth} and {data_source}; or FILE.txt."""
    system: str | None = None
    """System message."""
    parser: str | None = None
    """Regular expression with one group, whose last match is the score; null for Score: NUMBER."""
    scores: Annotated[dict[str, float], Field(default_factory=dict)]
    """Word in the group -> score."""
    range: Range | None = None
    """Minimum and maximum score; other scores are errors."""
    temperature: float = 0.0
    max_tokens: Positive = 512
    """Maximum number of tokens of an answer; a longer one is an error."""
    extra_body: Options
    """Additional fields of requests to the endpoint."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's API key."""
    timeout: PositiveFloat = 60.0
    """Timeout of a response in seconds, including all attempts."""
    attempts: Positive = 4
    """Maximum number of requests for a response if the endpoint is busy or fails."""
    max_concurrent: Positive = 32
    """Maximum number of concurrent requests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the model at path."""


class IntegrationPart(AnyPart):
    """A reward of an integration in another package, whose keys are in the section `integrations.KIND`."""

    kind: str


RewardPart = IntegrationPart | RulesPart | FunctionPart | ModelPart | JudgePart
_PARTS: dict[str, type[AnyPart]] = {
    "rules": RulesPart, "function": FunctionPart, "model": ModelPart, "judge": JudgePart,
}  # fmt: skip


def check_has_part(sections: Mapping[str, RewardPart], data_source: str) -> None:
    """Check that a part scores rows of this data source.

    Raises:
        ValueError: no part scores it.
    """
    if not any(section.data_sources is None or data_source in section.data_sources for section in sections.values()):
        raise ValueError(f"`data_source` is {data_source!r}, which none of reward_model.parts scores; add it to one")


def read_parts(options: Mapping[str, object]) -> dict[str, RewardPart]:
    """Return the parts as typed sections; they must have no `part_problems`."""
    return {name: _reader(str(section["kind"])).validate_python(section) for name, section in options.items()}  # type: ignore[index]


def part_problems(options: Mapping[str, object]) -> list[Problem]:
    """Return the problems of each part by itself."""
    problems: list[Problem] = []
    for name, section in options.items():
        path = f"{KEY}.{name}"
        if not str(name).replace("-", "_").isidentifier():
            problems.append(
                Problem(path, "is not a name", "use letters, digits, _ and -; the part is logged by its name")
            )
        elif not isinstance(section, dict):
            problems.append(
                Problem(path, f"{section!r} is not a part", f"give {{kind: {'|'.join(_PARTS)}, weight: 1.0}}")
            )
        elif (kind := section.get("kind")) not in _PARTS and kind not in installed():
            kinds = (*_PARTS, *installed())
            fix = f"choose one of {', '.join(kinds)}.{did_you_mean(str(kind), kinds)}"
            problems.append(Problem(f"{path}.kind", f"{kind!r} is not a kind of reward", fix))
        else:
            problems += _problems_of(path, str(kind), section)
    return problems


def _reader(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_PARTS.get(kind, IntegrationPart))


def _problems_of(path: str, kind: str, section: Mapping[str, object]) -> list[Problem]:
    try:
        read = _reader(kind).validate_python(section)
    except ValidationError as error:
        fields = _PARTS.get(kind, IntegrationPart)
        return [section_problem(path, fields, f"a part of kind {kind}", detail) for detail in error.errors()]
    if not isinstance(read, JudgePart):
        return []
    problems = []
    if (read.base_url is None) == (read.path is None):
        alternatives = "an endpoint (base_url) or a model (path)"
        problems.append(
            Problem(path, f"a judge is {alternatives}, and it has {'both' if read.path else 'none'}", "give one")
        )
    elif read.base_url is not None and read.model is None:
        problems.append(Problem(f"{path}.model", "missing", "give the model's name at the endpoint"))
    elif read.path is not None and read.temperature != 0:
        what = f"{read.temperature} samples answers, but a model run by tether answers greedily, so that runs repeat"
        problems.append(Problem(f"{path}.temperature", what, "leave it out"))
    return problems
