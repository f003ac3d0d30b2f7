"""Question answering by search: an answer in tags is right where it is one of the known ones, word for word."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping
from contextlib import suppress

from tether.rewards.rules.extract import answer_tag, required

MANY_TAGS = 10
"""Tags of one kind above which a right answer counts a quarter: they were written to be found by chance."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, object]) -> float:
    """1.0 if the last ``<answer>...</answer>`` is one of the answers, as SQuAD compares them (arXiv 1606.05250).

    Case, punctuation, articles and spaces do not count. `ground_truth` is a text, a list of texts, or a mapping with
    them under ``target``, which may be JSON. This is verl's rule for Search-R1's data (arXiv 2503.09516).

    Raises:
        ValueError: there is no answer to compare with.
    """
    known = {_normalised(answer) for answer in answers_of(ground_truth)}
    given = answer_tag(solution_str)
    if given is None or _normalised(given) not in known:
        return 0.0
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return 0.25 if tags > MANY_TAGS else 1.0


def answers_of(ground_truth: object) -> list[str]:
    """The texts that are right.

    Raises:
        ValueError: there are none.
    """
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):  # a text that begins so
            ground_truth = json.loads(ground_truth)
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if isinstance(ground_truth, str) or not isinstance(ground_truth, Iterable):
        return [required(ground_truth)]
    answers = [required(answer) for answer in ground_truth]
    return answers or [required(None)]


def _normalised(answer: str) -> str:
    without_marks = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_ARTICLES.sub(" ", without_marks).split())
