"""The questions of the page, by address; the server answers them on request, an exported file contains the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tether.view import compare, queries
from tether.view.advice import RULE_NAMES, advise
from tether.view.run import RunFolder

Arguments = Mapping[str, str]


def answer(runs: Sequence[RunFolder], question: str, arguments: Arguments, reward: str | None = None) -> object:
    """Return the answer to a question of the page.

    Args:
        runs: all runs.
        question: the name of the question.
        arguments: ``run`` is the index of the run; other arguments depend on the question.
        reward: ``FILE.py:NAME`` of a function with which the page offers to score samples.

    Raises:
        ValueError: the question is unknown, or its arguments are invalid.
    """
    if question == "runs":
        return compare.comparison(runs) | {"versions": [run.version for run in runs], "reward": reward}
    if question == "mean_curves":
        return compare.mean_curves(runs, arguments["key"], arguments.get("axis", "step"))
    run = runs[_number(arguments, "run", 0) or 0]
    step, row = _number(arguments, "step"), _number(arguments, "row")
    match question:
        case "overview":
            return queries.overview(run) | {
                "advice": advise(run),
                "rules": RULE_NAMES,
                "config": compare.flat(run.config),
            }
        case "curves":
            return queries.curves(run, arguments["keys"].split(","), arguments.get("axis", "step"))
        case "samples":
            limit = min(_number(arguments, "limit", 100) or 100, queries.MAX_ROWS)
            where, text, sort = (arguments.get(name) or None for name in ("where", "text", "sort"))
            return queries.samples(run, step=step, where=where, text=text, sort=sort, limit=limit)
        case "distributions":
            return queries.distributions(run, _required(step, "step"))
        case "groups":
            return queries.groups(run, _required(step, "step"))
        case "group":
            return queries.group(run, _required(step, "step"), _required(_number(arguments, "group"), "group"))
        case "sample":
            return queries.sample(run, _required(step, "step"), _required(row, "row"))
        case "episode":
            return queries.episode(run, _required(step, "step"), _required(row, "row"))
        case "prompts":
            return queries.prompts(run)
        case "prompt":
            return queries.prompt_history(run, _required(_number(arguments, "index"), "index"))
        case "validation":
            return queries.validation(run, _required(step, "step"), arguments.get("sort") or None)
        case "parts":
            return queries.parts(run)
        case "tasks":
            return queries.tasks(run)
    raise ValueError(f"no question {question!r}")


def _number(arguments: Arguments, name: str, default: int | None = None) -> int | None:
    value = arguments.get(name)
    if value in (None, ""):
        return default
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{name}={value!r}: must be a whole number") from None


def _required(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"{name} is missing")
    return value
