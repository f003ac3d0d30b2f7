"""`reward_model.parts`: several rewards, whose weighted sum is the score. Their names are the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from tether.config.problems import Problem
from tether.config.schema.section import Options, Positive, PositiveFloat, Section, Strings
from tether.spelling import did_you_mean

KEY = "reward_model.parts"


def _least_and_greatest(value: object) -> object:
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or not all(type(number) in (int, float) for number in numbers) or numbers[0] >= numbers[1]:
        raise ValueError("a range is [least, greatest], such as [0, 10]")
    return tuple(numbers)


Range = Annotated[tuple[float, float], BeforeValidator(_least_and_greatest)]


class AnyPart(Section):
    """Fields of every part."""

    weight: float = 1.0
    """Factor of its score; 0: it is logged and not learned from."""
    optional: bool = False
    """Where it abstains, the other parts score the response; otherwise nothing does."""
    data_sources: Strings | None = None
    """It scores rows of these only; null: all."""


class RulesPart(AnyPart):
    """The reward of a run without parts: custom_reward_function, else the rule of the row's data_source."""

    kind: Literal["rules"]


class FunctionPart(AnyPart):
    """A function of yours, called as custom_reward_function is."""

    kind: Literal["function"]
    path: str
    name: str = "compute_score"
    reward_kwargs: Options


class ModelPart(AnyPart):
    """The learned reward model of `reward_model.model`."""

    kind: Literal["model"]


class JudgePart(AnyPart):
    """A language model that is shown the response and asked for a score."""

    kind: Literal["judge"]
    base_url: str | None = None
    """Of an endpoint that speaks OpenAI's API, such as https://HOST/v1."""
    path: str | None = None
    """Or a model that tether samples from itself: its directory or hub id."""
    model: str | None = None
    """The model's name at the endpoint."""
    prompt: str
    """Text that shows {prompt} and {response}, and {ground_truth} or {data_source} if asked for; or FILE.txt."""
    system: str | None = None
    """A system message before it."""
    parser: str | None = None
    """Regular expression with one group; its last match is the score. null: Score: NUMBER."""
    scores: Annotated[dict[str, float], Field(default_factory=dict)]
    """Word -> score, where the group is a word."""
    range: Range | None = None
    """Least and greatest score; what is beyond is an error."""
    temperature: float = 0.0
    max_tokens: Positive = 512
    """Tokens of an answer; a longer one is an error."""
    extra_body: Options
    """More fields of the request, for the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key."""
    timeout: PositiveFloat = 60.0
    """Seconds that a response may take, all attempts included."""
    attempts: Positive = 4
    """Requests for one response, where the endpoint is busy or fails."""
    max_concurrent: Positive = 32
    """Requests at once."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of a model at path."""


RewardPart = RulesPart | FunctionPart | ModelPart | JudgePart
_PARTS: dict[str, type[AnyPart]] = {
    "rules": RulesPart, "function": FunctionPart, "model": ModelPart, "judge": JudgePart,
}  # fmt: skip


def check_has_part(parts: Mapping[str, RewardPart], data_source: str) -> None:
    """Refuse a row that no part scores.

    Raises:
        ValueError: names its data source.
    """
    if not any(part.data_sources is None or data_source in part.data_sources for part in parts.values()):
        raise ValueError(f"`data_source` is {data_source!r}, which none of reward_model.parts scores; add it to one")


def read_parts(given: Mapping[str, object]) -> dict[str, RewardPart]:
    """The parts as typed sections. To be called on what `part_problems` has no word about."""
    return {name: _adapter(str(part["kind"])).validate_python(part) for name, part in given.items()}  # type: ignore[index]


def part_problems(given: Mapping[str, object]) -> list[Problem]:
    """All that is wrong with each part by itself."""
    problems: list[Problem] = []
    for name, part in given.items():
        path = f"{KEY}.{name}"
        if not str(name).replace("-", "_").isidentifier():
            problems.append(Problem(path, "is no name", "take letters, digits, _ and -; it is logged under it"))
        elif not isinstance(part, dict):
            problems.append(Problem(path, f"{part!r} is no part", f"give {{kind: {'|'.join(_PARTS)}, weight: 1.0}}"))
        elif (kind := part.get("kind")) not in _PARTS:
            fix = f"choose one of {', '.join(_PARTS)}.{did_you_mean(str(kind), _PARTS)}"
            problems.append(Problem(f"{path}.kind", f"{kind!r} is no kind of reward", fix))
        else:
            problems += _problems_of(path, str(kind), part)
    return problems


def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_PARTS[kind])


def _problems_of(path: str, kind: str, part: Mapping[str, object]) -> list[Problem]:
    try:
        read = _adapter(kind).validate_python(part)
    except ValidationError as error:
        return [_worded(path, kind, detail) for detail in error.errors()]
    if not isinstance(read, JudgePart):
        return []
    problems = []
    if (read.base_url is None) == (read.path is None):
        which = "an endpoint (base_url) or a model (path)"
        problems.append(Problem(path, f"a judge is {which}, and it has {'both' if read.path else 'none'}", "give one"))
    elif read.base_url is not None and read.model is None:
        problems.append(Problem(f"{path}.model", "missing", "say what the endpoint calls the model"))
    elif read.path is not None and read.temperature != 0:
        what = f"{read.temperature} draws answers, and a model of tether's own answers greedily, so that runs repeat"
        problems.append(Problem(f"{path}.temperature", what, "leave it out"))
    return problems


def _worded(path: str, kind: str, detail: Any) -> Problem:
    where = ".".join(str(step) for step in detail["loc"])
    if detail["type"] == "extra_forbidden":
        names = tuple(_PARTS[kind].model_fields)
        fix = did_you_mean(where, names).strip() or f"there are {', '.join(names)}"
        return Problem(f"{path}.{where}", f"a part of kind {kind} has no such key", fix)
    if detail["type"] == "missing":
        return Problem(f"{path}.{where}", "missing", f"a part of kind {kind} needs it")
    message = detail["msg"].removeprefix("Value error, ")
    return Problem(f"{path}.{where}", f"{detail['input']!r}: {message}", "correct it")
