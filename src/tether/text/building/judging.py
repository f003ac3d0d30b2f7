"""The prompt and parser of a judge, read from the configuration without loading a model."""

from __future__ import annotations

from pathlib import Path

from tether.config import JudgePart
from tether.text.rewards.judge import NUMBER, Judge

TEMPLATES = (".txt", ".md")
"""Suffixes that mark a prompt as a file name."""


def judge_of(key: str, section: JudgePart) -> Judge:
    """Return the template and parser of a judge's section.

    Raises:
        ValueError: they are invalid, or the file cannot be read; the message begins with `key`.
    """
    judge = Judge(_text(key, section.prompt), section.system, section.parser or NUMBER, section.scores, section.range)
    judge.check(key)
    return judge


def _text(key: str, prompt: str) -> str:
    """Return a prompt, or the content of the file that it names."""
    if not prompt.endswith(TEMPLATES) or "\n" in prompt:
        return prompt
    try:
        return Path(prompt).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"{key}.prompt: {prompt} cannot be read ({why})") from error
