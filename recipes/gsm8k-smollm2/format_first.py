"""The strict rule, and a little for an answer in the asked form: a start for a policy that hardly ever writes it."""

import re
from typing import Any

from tether.text.rewards.rules.gsm8k import strict

_ANSWER = re.compile(r"#### -?\$?[0-9][0-9.,]*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], format_score: float = 0.1
) -> dict[str, float]:
    """1 for the right answer by `tether.text.rewards.rules.gsm8k.strict`; for another ``#### number`` part of
    `format_score`.

    All of it where the reply ends there, half of it where it goes on. ``acc``, which validation watches, is the strict
    rule alone.
    """
    right = strict(data_source, solution_str, ground_truth, extra_info)
    answers = list(_ANSWER.finditer(solution_str))
    ends_there = bool(answers) and not solution_str[answers[-1].end() :].strip()
    formatted = 1.0 if ends_there else 0.5 * bool(answers)
    return {"score": max(right, format_score * formatted), "acc": right, "format": formatted}
