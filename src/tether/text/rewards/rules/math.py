"""Competition mathematics: answers are LaTeX, compared by value with math-verify."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from tether.text.rewards.rules.bounded import LimitExceeded, bounded
from tether.text.rewards.rules.extract import last_boxed, required
from tether.types import ExtraInfo

# math-verify warns that its own timeouts are off. They are off on purpose: they use SIGALRM, which fails outside the
# main thread, would replace another alarm, and does not interrupt a power of large numbers.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_ANSWER_PHRASE = re.compile(r"(?i)answers?(?:\s*:|\s+is\b|\s+are\b)\s*([^\n]+)")
_SHORT = re.compile(r"[\w\s.,/$()+-]{0,30}")
"""Answers that are always fast to compare."""
_DAPO_WINDOW = 300
_FORMAT = 0.1  # share of geo3k's score


def equal(answer: str, ground_truth: str) -> bool:
    r"""Return whether two LaTeX answers have the same value: ``\frac12`` and 0.5, ``x = 3`` and 3, or ``10\%`` and 10.

    An answer that cannot be parsed is wrong, and so is one whose comparison takes seconds or a gigabyte, such as
    ``9^{9^{9}}``.

    Raises:
        Exception: the comparison itself failed, so the result is unknown.
    """
    # Such an answer is not an error: the update would ignore it, and many errors end the run.
    answer, ground_truth = _normalised(answer), _normalised(ground_truth)
    if answer == ground_truth:
        return True
    gold = _parsed(ground_truth)
    if _SHORT.fullmatch(answer):
        return _verified(gold, answer)
    try:
        return bool(bounded(_verified, gold, answer))
    except LimitExceeded:
        return False


def _verified(gold: list[Any], answer: str) -> bool:
    return bool(verify(gold, _parsed(answer), timeout_seconds=None, raise_on_error=True))


def _parsed(text: str) -> list[Any]:
    return list(parse(rf"\boxed{{{text}}}", _LATEX, parsing_timeout=None))


def _normalised(answer: str) -> str:
    r"""Remove what math-verify does not parse: percent signs (so that ``10\%`` is 10) and a full stop at the end."""
    return answer.replace("\\%", "").replace("%", "").strip().removesuffix(".")


def _unboxed(answer: str) -> str:
    r"""Return the content of the last ``\boxed{...}``, or the entire text if there is none."""
    return last_boxed(answer) or answer


def boxed(data_source: str, solution_str: str, ground_truth: object, extra_info: ExtraInfo) -> float:
    r"""Return 1.0 if the last ``\boxed{...}`` of the reply equals `ground_truth`; 0.0 if it differs or is missing."""
    expected = _unboxed(required(ground_truth))
    answer = last_boxed(solution_str)
    return float(answer is not None and equal(answer, expected))


def dapo(data_source: str, solution_str: str, ground_truth: object, extra_info: ExtraInfo) -> dict[str, object]:
    """Return DAPO's reward (arXiv 2503.14476): +1 for the right answer, otherwise -1; with "acc" and "pred".

    The answer is the last ``Answer: ...`` line in the final 300 characters, otherwise the last boxed expression.
    """
    expected = _unboxed(required(ground_truth))
    lines = _ANSWER_LINE.findall(solution_str[-_DAPO_WINDOW:])
    answer = lines[-1].strip().rstrip(".").strip("$") if lines else last_boxed(solution_str)
    right = answer is not None and equal(_unboxed(answer), expected)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


def numina(data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, object]) -> float:
    r"""Return 1.0 if the last ``\boxed{...}``, otherwise the text after the last "answer is" or "answer:", is right."""
    expected = _unboxed(required(ground_truth))
    phrases = _ANSWER_PHRASE.findall(solution_str)
    answer = last_boxed(solution_str) or (phrases[-1].strip().rstrip(".").strip("$") if phrases else None)
    return float(answer is not None and equal(answer, expected))


def geo3k(
    data_source: str, solution_str: str, ground_truth: object, extra_info: dict[str, object]
) -> dict[str, object]:
    r"""Return 0.9 for the right answer in the last ``\boxed{...}``, plus 0.1 for ``<think>...</think>`` before it.

    The result also has "acc".
    """
    right = boxed(data_source, solution_str, ground_truth, extra_info)
    formatted = _has_reasoning(solution_str)
    return {"score": (1 - _FORMAT) * right + _FORMAT * formatted, "acc": bool(right)}


def _has_reasoning(text: str) -> bool:
    r"""Return whether a reply begins with ``<think>`` and has ``</think>``, ``\boxed{`` and ``}`` in this order."""
    for mark in ("</think>", "\\boxed{"):
        before, separator, text = text.partition(mark)
        if not separator or (mark == "</think>" and not before.startswith("<think>")):
            return False
    return "}" in text
