"""The strict rule, and a little for steps that end in the asked form: a start for a policy that hardly ever ends so."""

import re
from typing import Any

from tether.text.rewards.rules.gsm8k import strict

_ENDING = re.compile(r"(.*)#### -?\$?[0-9][0-9.,]*\s*", re.DOTALL)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    format_score: float = 0.1,
    min_words: int = 20,
) -> dict[str, float]:
    """1 for the right answer by `tether.text.rewards.rules.gsm8k.strict`; `format_score` for another that ends in
    ``#### number`` after at least `min_words` words.

    The prompt asks to think step by step: a bare ``#### 7`` earns nothing unless 7 is right. ``acc``, which validation
    watches, is the strict rule alone.
    """
    right = strict(data_source, solution_str, ground_truth, extra_info)
    ending = _ENDING.fullmatch(solution_str)
    formatted = float(ending is not None and len(ending[1].split()) >= min_words)
    return {"score": max(right, format_score * formatted), "acc": right, "format": formatted}
