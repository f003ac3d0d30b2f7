"""Which rule scores which `data_source`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

from tether.rewards.rules.extract import required
from tether.rewards.rules.search import answers_of
from tether.rewards.sandbox.cases import parse_tests, refuse_filled
from tether.rewards.sandbox.options import ProgramOptions
from tether.runtime.install import pip_install
from tether.spelling import ask, closest
from tether.types import ExtraInfo

RewardFunction: TypeAlias = Callable[..., Any]
"""``fn(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``; see `outcome_of` for the result."""

_MATH = "tether.rewards.rules.math:boxed"
_DAPO = "tether.rewards.rules.math:dapo"
_SEARCH = "tether.rewards.rules.search:exact_match"
_REASONING_GYM = "tether.rewards.rules.reasoning_gym:score"
_PROGRAM = "tether.rewards.sandbox.reward:ProgramReward"

_NUMINA = tuple(
    f"numina_{name}" for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
)
# Import paths, not functions: a worker process loads only the rules that its rows need.
REWARDS: dict[str, str] = {
    "openai/gsm8k": "tether.rewards.rules.gsm8k:strict",
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "lighteval/MATH": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "math_dapo": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "math": _DAPO,
    **dict.fromkeys(_NUMINA, "tether.rewards.rules.math:numina"),
    "hiyouga/geometry3k": "tether.rewards.rules.math:geo3k",
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
    """``module:function`` of the rule for `data_source`, or None if there is none."""
    by_prefix = (path for prefix, path in REWARDS_BY_PREFIX.items() if data_source.startswith(prefix))
    return REWARDS.get(data_source) or next(by_prefix, None)


def check_sources(data_sources: Iterable[str], programs: ProgramOptions) -> None:
    """Refuse data that no rule can score, before anything is loaded. Not for runs with a function of their own.

    Raises:
        ValueError: sources without a rule (all of them named, with the nearest known names), a rule whose optional
            dependency is not installed, or programs that cannot be run as `programs` says.
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
    """Refuse a row that no rule scores.

    Raises:
        ValueError: with the nearest known names.
    """
    if import_path(data_source) is None:
        raise ValueError(_no_rule([data_source]))


def has_tests(data_source: str) -> bool:
    """Whether the ground truth of a row is tests for a program, which are no answer."""
    return import_path(data_source) == _PROGRAM


def check_truth(data_source: str, ground_truth: object, extra_info: ExtraInfo, *, from_columns: bool = False) -> None:
    """Refuse a row that its rule, if there is one, can give no score.

    An empty answer, as two rows of MATH have it, is an error of its row when it is scored.

    Args:
        data_source: of the row.
        ground_truth: of the row.
        extra_info: of the row.
        from_columns: the row may come from columns, which change values to those of one type (`refuse_filled`).

    Raises:
        ValueError: what is wrong with its answer or its tests.
    """
    path = import_path(data_source)
    if path == _PROGRAM:
        tests = parse_tests(ground_truth)
        if from_columns:
            refuse_filled(ground_truth, tests)
    elif ground_truth in (None, ""):
        return
    elif path == _SEARCH:
        answers_of(ground_truth)
    elif path == _REASONING_GYM:
        if not isinstance(extra_info.get("reasoning_gym"), dict):
            raise ValueError(
                f"{data_source} is scored by what a `reasoning_gym:TASK` in data.train_files puts into "
                "extra_info.reasoning_gym, which the row does not have; name the task so, or give another data_source"
            )
    elif path is not None:
        required(ground_truth)


@lru_cache
def find_reward(data_source: str, programs: ProgramOptions) -> RewardFunction:
    """The rule for `data_source`, imported when first asked for.

    Args:
        data_source: of a row.
        programs: how programs are run, where that is the rule.

    Raises:
        ValueError: there is none.
    """
    path = import_path(data_source)
    if path is None:
        raise ValueError(_no_rule([data_source]))
    module, name = path.split(":")
    found = getattr(importlib.import_module(module), name)
    function: RewardFunction = found(programs) if path == _PROGRAM else found
    return function


def _no_rule(sources: list[str]) -> str:
    known = [*REWARDS, *(f"{prefix}*" for prefix in REWARDS_BY_PREFIX)]
    hint = ask(sorted({name for source in sources for name in closest(source, known)}))
    return (
        f"no reward for data_source {', '.join(map(repr, sources))}.{hint} Known: {', '.join(known)}. "
        "For your own reward set custom_reward_function.path to a Python file and custom_reward_function.name to "
        "a function fn(data_source, solution_str, ground_truth, extra_info) in it."
    )
