"""Extraction of the answer from a reply."""

from __future__ import annotations

import re

# A sign counts only if it does not follow a digit: "7-3" contains 7 and 3, "= -3" contains -3.
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_number(text: str) -> str | None:
    """Return the last number of `text`, without "+", "$" and thousands separators; None if there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace("$", "").replace(",", "").removeprefix("+") if numbers else None


def first_word(text: str) -> str | None:
    """Return the first word of `text`, which may contain hyphens and apostrophes; None if there is none."""
    match = _WORD.search(text)
    return match[0] if match else None


def answer_tag(text: str) -> str | None:
    """Return the content of the last ``<answer>...</answer>``, stripped; None if there is none."""
    answers = _ANSWER_TAG.findall(text)
    return answers[-1].strip() if answers else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, with nested braces; None if it is missing or not closed."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for match in re.finditer(r"(?<!\\)[{}]", text[starts[-1] :]):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[starts[-1] : starts[-1] + match.start()].strip()
    return None


def required(ground_truth: object) -> str:
    """Convert `ground_truth` to text; a list with one answer to that answer, and 72.0 to 72.

    Raises:
        ValueError: no answer could equal it, because it is None, empty, or neither text nor a number.
    """
    answer = ground_truth[0] if isinstance(ground_truth, list) and len(ground_truth) == 1 else ground_truth
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = str(answer).strip() if isinstance(answer, str | int | float) else ""
    if not text:
        raise ValueError(
            f"the row's reward_model.ground_truth is {ground_truth!r:.80}; this reward needs an answer, text or number"
        )
    return text
