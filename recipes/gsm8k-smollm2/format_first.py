"""The strict rule, and a little for an answer in the asked form: a start for a policy that never writes it."""

import re
from typing import Any

from tether.rewards.gsm8k import strict

_LAST_LINE = re.compile(r"#### -?\$?[0-9][0-9.,]*\s*$")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], format_score: float = 0.1
) -> dict[str, float]:
    """1 for the right answer by `tether.rewards.gsm8k.strict`, `format_score` for a reply that ends in ``#### number``.

    ``acc``, which validation watches, is the strict rule alone.
    """
    right = strict(data_source, solution_str, ground_truth, extra_info)
    formatted = float(bool(_LAST_LINE.search(solution_str)))
    return {"score": max(right, format_score * formatted), "acc": right, "format": formatted}
