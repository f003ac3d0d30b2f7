"""Selects the rule that scores a `data_source`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

from tether.runtime.install import pip_install
from tether.spelling import ask, closest
from tether.text.rewards.rules.extract import required
from tether.text.rewards.rules.search import answers_of
from tether.text.rewards.sandbox.cases import parse_tests, refuse_converted
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.types import ExtraInfo

RewardFunction: TypeAlias = Callable[..., Any]
"""``fn(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``; `outcome_of` converts the result."""

_MATH = "tether.text.rewards.rules.math:boxed"
_DAPO = "tether.text.rewards.rules.math:dapo"
_SEARCH = "tether.text.rewards.rules.search:exact_match"
_REASONING_GYM = "tether.text.rewards.rules.reasoning_gym:score"
_PROGRAM = "tether.text.rewards.sandbox.reward:ProgramReward"

_NUMINA = tuple(
    f"numina_{name}" for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
)
# Import paths and not functions, so that a worker process loads only the rules that its rows need.
REWARDS: dict[str, str] = {
    "openai/gsm8k": "tether.text.rewards.rules.gsm8k:strict",
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "lighteval/MATH": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "math_dapo": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "math": _DAPO,
    **dict.fromkeys(_NUMINA, "tether.text.rewards.rules.math:numina"),
    "hiyouga/geometry3k": "tether.text.rewards.rules.math:geo3k",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco", "codeparrot/apps", "BAAI/TACO"), _PROGRAM),
    **dict.fromkeys(("openai_humaneval", "openai/openai_humaneval", "mbpp", "google-research-datasets/mbpp"), _PROGRAM),
}
REWARDS_BY_PREFIX: dict[str, str] = {
    "aime": _DAPO,
    "searchR1_": _SEARCH,
    "livecodebench/": _PROGRAM,
    "reasoning_gym/": _REASONING_GYM,
}


def import_path(data_source: str) -> str | None:
    """Return ``module:function`` of the rule for `data_source`, or None if there is none."""
    by_prefix = (path for prefix, path in REWARDS_BY_PREFIX.items() if data_source.startswith(prefix))
    return REWARDS.get(data_source) or next(by_prefix, None)


def check_sources(data_sources: Iterable[str], programs: ProgramOptions) -> None:
    """Check that rules can score all data, before anything is loaded. Runs with a user's function do not need this.

    Raises:
        ValueError: sources have no rule (the message names all and suggests similar names), an optional dependency of
            a rule is not installed, or programs cannot run with these options.
    """
    sources = sorted(set(data_sources))
    unknown = [source for source in sources if import_path(source) is None]
    if unknown:
        raise ValueError(_no_rule(unknown))
    if any(source.startswith("reasoning_gym/") for source in sources) and not importlib.util.find_spec("reasoning_gym"):
        raise ValueError(f"data_source reasoning_gym/* needs the package reasoning-gym: {pip_install('quickstart')}")
    if any(has_tests(source) for source in sources):
        programs.check()


def check_source(data_source: str) -> None:
    """Check that a rule scores a row.

    Raises:
        ValueError: there is no rule; the message suggests similar names.
    """
    if import_path(data_source) is None:
        raise ValueError(_no_rule([data_source]))


def has_tests(data_source: str) -> bool:
    """Return whether the ground truth of a row consists of tests for a program rather than an answer."""
    return import_path(data_source) == _PROGRAM


def check_truth(data_source: str, ground_truth: object, extra_info: ExtraInfo, *, from_columns: bool = False) -> None:
    """Check that the rule for a row, if there is one, can score it.

    An empty answer is accepted by this check, because two rows of MATH have one; scoring such a row is an error.

    Args:
        data_source: data source of the row.
        ground_truth: ground truth of the row.
        extra_info: extra information of the row.
        from_columns: whether the row may come from columns, which convert values to one type (`refuse_converted`).

    Raises:
        ValueError: the answer or the tests of the row are invalid.
    """
    path = import_path(data_source)
    if path == _PROGRAM:
        tests = parse_tests(ground_truth)
        if from_columns:
            refuse_converted(ground_truth, tests)
    elif ground_truth in (None, ""):
        return
    elif path == _SEARCH:
        answers_of(ground_truth)
    elif path == _REASONING_GYM:
        if not isinstance(extra_info.get("reasoning_gym"), dict):
            raise ValueError(
                f"{data_source} is scored with extra_info.reasoning_gym, which the row does not have. A "
                "`reasoning_gym:TASK` in data.train_files adds it; use that, or another data_source"
            )
    elif path is not None:
        required(ground_truth)


@lru_cache
def find_reward(data_source: str, programs: ProgramOptions = ProgramOptions()) -> RewardFunction:
    """Return the rule for `data_source`, which is imported at the first call.

    Raises:
        ValueError: there is no rule.
    """
    path = import_path(data_source)
    if path is None:
        raise ValueError(_no_rule([data_source]))
    module, name = path.split(":")
    rule = getattr(importlib.import_module(module), name)
    function: RewardFunction = rule(programs) if path == _PROGRAM else rule
    return function


def _no_rule(sources: list[str]) -> str:
    names = [*REWARDS, *(f"{prefix}*" for prefix in REWARDS_BY_PREFIX)]
    hint = ask(sorted({name for source in sources for name in closest(source, names)}))
    return (
        f"no reward for data_source {', '.join(map(repr, sources))}.{hint} Known: {', '.join(names)}. "
        "For your own reward set custom_reward_function.path to a Python file and custom_reward_function.name to "
        "a function fn(data_source, solution_str, ground_truth, extra_info) in it."
    )
