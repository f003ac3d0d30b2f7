"""Finding the answer in a reply."""

from __future__ import annotations

import re

# A sign counts only where it does not follow a digit: "7-3" holds 7 and 3, "= -3" holds -3.
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_number(text: str) -> str | None:
    """The last integer or decimal of `text`, without "+", "$" and the commas between thousands; None without one."""
    found = _NUMBER.findall(text)
    return found[-1].replace("$", "").replace(",", "").removeprefix("+") if found else None


def first_word(text: str) -> str | None:
    """The first word of `text`, without the marks around it; None without one. A hyphen or apostrophe joins a word."""
    found = _WORD.search(text)
    return found[0] if found else None


def answer_tag(text: str) -> str | None:
    """The content of the last ``<answer>...</answer>``, stripped; None without one."""
    found = _ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, whose braces may nest; None without one, or if it never closes."""
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
    """`ground_truth` as text; of a list with one answer that one, and 72 of 72.0.

    Raises:
        ValueError: nothing could ever be equal to it: it is None, empty, or no text or number.
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
