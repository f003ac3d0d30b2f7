r"""Columns of a source: which contain question and answer, and how published layouts are recognised.

A layout is recognised if a source has its columns and the first row contains its mark (`#### N`, `\boxed{...}`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tether.text.rewards.rules import last_boxed

_MARKED = re.compile(r"####\s*(-?\$?[0-9.,]*[0-9])\.?\s*\Z")
_UNBRACED = re.compile(r"\\boxed\s+([^\s${][^${]*)")
_QUESTIONS = ("prompt", "question", "problem", "instruction", "query", "input")
_ANSWERS = ("answer", "solution", "final_answer", "output", "response", "completion", "target", "label")


@dataclass(frozen=True)
class PublishedLayout:
    """A published dataset's rows: a question, and a worked solution that ends with the answer."""

    name: str
    question: str
    solution: str
    data_source: str
    mark: str
    """The mark of the answer, for messages."""
    extract: Callable[[str], str | None]
    """Extracts the answer from a solution, or None."""


def _after_marks(solution: str) -> str | None:
    match = _MARKED.search(solution)
    return match[1].replace(",", "").replace("$", "") if match else None


def _boxed(solution: str) -> str | None:
    unbraced = _UNBRACED.findall(solution)  # a few answers in MATH: $\boxed 2$
    return last_boxed(solution) or (unbraced[-1].strip() if unbraced else None)


LAYOUTS = (
    PublishedLayout("GSM8K", "question", "answer", "openai/gsm8k", "#### number", _after_marks),
    PublishedLayout("MATH", "problem", "solution", "DigitalLearningGmbH/MATH-lighteval", r"\boxed{...}", _boxed),
)
LAYOUT_KEYS = {"answer", *(key for layout in LAYOUTS for key in (layout.question, layout.solution))}


@dataclass(frozen=True)
class Columns:
    """Names of a source's columns, and text to add to its prompts."""

    prompt: str = "prompt"
    data_source: str = "data_source"
    answer: str | None = None
    """Column of correct answers; None: they are in ``reward_model``."""
    default_source: str | None = None
    """Default `data_source`; None: each row must have one."""
    layout: PublishedLayout | None = None
    """Layout that extracts the answer from the column; None: the column contains only the answer."""
    recognised_as: str = ""
    """Name of the recognised layout; "": the user named all columns."""
    system: str | None = None
    """Text of a system message before the prompt."""
    suffix: str = ""
    """Text appended verbatim to the last message."""
    others: tuple[str, ...] = ()
    """Further columns to read."""

    def with_options(self, options: Mapping[str, str]) -> Columns:
        """Return these columns, overridden by the options of one source (`tether.text.data.location.ROW_OPTIONS`)."""
        return replace(
            self,
            prompt=options.get("question", self.prompt),
            answer=options.get("answer", self.answer),
            default_source=options.get("data_source", self.default_source),
            system=options.get("system", self.system),
            suffix=options.get("suffix", self.suffix),
        )

    def recognised(self, keys: Sequence[str], first: object) -> Columns:
        """Return the columns of the layout recognised by `keys` and the row `first`; these columns if none is
        recognised.

        Columns that the user named are kept. The answer is extracted from a configured answer column only if the
        layout's reward scores the row, because a custom reward function may need the full column.
        """
        if not isinstance(first, Mapping) or (self.answer is None and "reward_model" in keys):
            return self
        for layout in LAYOUTS:
            solution = first.get(self.answer or layout.solution)
            source = first.get(self.data_source) or self.default_source or layout.data_source
            prompt = self.prompt if self.prompt in keys else layout.question
            if prompt not in keys or not isinstance(solution, str) or layout.extract(solution) is None:
                continue
            if self.answer is not None and source != layout.data_source:
                continue
            default = self.default_source or layout.data_source
            if self.answer is None and layout.solution != "answer" and isinstance(first.get("answer"), str):
                columns = replace(self, answer="answer")  # as in MATH-500
            else:
                columns = replace(self, answer=self.answer or layout.solution, layout=layout)
            return replace(columns, prompt=prompt, default_source=default, recognised_as=layout.name)
        return self

    def __str__(self) -> str:
        truth = f"{self.layout.mark} in `{self.answer}`" if self.layout else f"`{self.answer}`"
        source = self.default_source
        return f"{self.recognised_as} (question `{self.prompt}`, ground truth {truth}, data_source {source})"


def naming_advice(name: str, keys: Sequence[str], missing: Sequence[str]) -> str:
    """Return advice on how to set those of question, answer and data_source that are `missing`, with likely columns
    among `keys`.
    """
    question = next((key for key in _QUESTIONS if key in keys), "COLUMN")
    answer = next((key for key in _ANSWERS if key in keys and key != question), "COLUMN")
    named = {
        "question": ("data.prompt_key", question),
        "answer": ("data.answer_key", answer),
        "data_source": ("data.data_source", "REWARD"),
    }
    options = "&".join(f"{option}={named[option][1]}" for option in missing)
    settings = " ".join("=".join(named[option]) for option in missing)
    alone = " The answer column must hold the final answer alone, not a worked solution." if "answer" in missing else ""
    return (
        f'Name what is missing: "{name}{"&" if "?" in name else "?"}{options}", or for all sources {settings}.{alone}'
    )
