"""Question answering by search: an answer in tags is right if it equals one of the accepted answers."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping
from contextlib import suppress

from tether.rewards.rules.extract import answer_tag, required

MANY_TAGS = 10
"""Number of tags above which a right answer scores only 0.25, because such a reply guesses."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, object]) -> float:
    """Return 1.0 if the last ``<answer>...</answer>`` equals an accepted answer by SQuAD's rules (arXiv 1606.05250).

    Case, punctuation, articles and spaces do not count. `ground_truth` is a text, a list of texts, or a mapping with
    them under ``target``, which may be JSON. This is verl's rule for Search-R1's data (arXiv 2503.09516).

    Raises:
        ValueError: there is no accepted answer.
    """
    accepted = {_normalised(answer) for answer in answers_of(ground_truth)}
    answer = answer_tag(solution_str)
    if answer is None or _normalised(answer) not in accepted:
        return 0.0
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return 0.25 if tags > MANY_TAGS else 1.0


def answers_of(ground_truth: object) -> list[str]:
    """Return the accepted answers.

    Raises:
        ValueError: there are none.
    """
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):  # an answer may begin with a bracket, too
            ground_truth = json.loads(ground_truth)
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if isinstance(ground_truth, str) or not isinstance(ground_truth, Iterable):
        return [required(ground_truth)]
    answers = [required(answer) for answer in ground_truth]
    return answers or [required(None)]


def _normalised(answer: str) -> str:
    words = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_ARTICLES.sub(" ", words).split())
