"""GSM8K: school arithmetic with one number as the answer, written after ``####``."""

from __future__ import annotations

import re

from tether.rewards.rules.extract import required
from tether.types import ExtraInfo

_WINDOW = 300  # characters at the end of the reply: an answer in the middle of the reasoning is not the final one
_MARKED = re.compile(r"#### (-?\$?[0-9.,]+)")


def strict(data_source: str, solution_str: str, ground_truth: object, extra_info: ExtraInfo) -> float:
    """Return 1.0 if the last ``#### number`` of the final 300 characters equals `ground_truth` as a string.

    Commas and "$" are removed first. The format counts, too: there is exactly one space after the marks, and a full
    stop after the number makes it wrong. This is verl's rule, except that verl matches no number after "$".
    """
    expected = required(ground_truth)
    answers = _MARKED.findall(solution_str[-_WINDOW:])
    return float(bool(answers) and answers[-1].replace(",", "").replace("$", "") == expected)
