"""The prompt and the parser of a judge, read from the configuration; loads no model."""

from __future__ import annotations

from pathlib import Path

from tether.config import JudgePart
from tether.rewards.judge import NUMBER, Judge

TEMPLATES = (".txt", ".md")
"""Endings of a prompt that is the name of a file."""


def judge_of(key: str, part: JudgePart) -> Judge:
    """The template and the parser of a part.

    Raises:
        ValueError: they cannot work, or the template's file cannot be read; begins with `key`.
    """
    judge = Judge(_text(key, part.prompt), part.system, part.parser or NUMBER, part.scores, part.range)
    judge.check(key)
    return judge


def _text(key: str, prompt: str) -> str:
    """A prompt, or the content of the file that it names."""
    if not prompt.endswith(TEMPLATES) or "\n" in prompt:
        return prompt
    try:
        return Path(prompt).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"{key}.prompt: {prompt} cannot be read ({why})") from error
