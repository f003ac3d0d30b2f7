"""Procedural tasks of reasoning-gym: each task has its own scorer, which is rebuilt from the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from tether.text.rewards.rules.bounded import BoundedProcessKilled, bounded
from tether.text.rewards.rules.extract import answer_tag, first_word, last_number
from tether.text.rewards.rules.reasoning_answers import UNBOUNDED_TASKS, is_right, may_be_scored
from tether.types import ExtraInfo


def _full_reply(text: str) -> str:
    return text.strip()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "last_number": last_number,
    "answer_tag": answer_tag,
    "first_word": first_word,
    "full": _full_reply,
}

_EMPTY = ""  # an answer that no scorer evaluates


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo) -> float:
    """Score the answer in the reply with the task's own scorer; 0.0 if there is no answer.

    `extra_info["reasoning_gym"]` has "task", "params" (of the dataset), "entry" (question, answer, metadata) and
    "extract" (a key of `EXTRACTORS`).

    An answer counts as an empty one if a scorer would execute it, exceed its limits, raise, or wrongly accept it
    (`tether.text.rewards.rules.reasoning_answers`).

    Raises:
        ValueError: "extract" or the task is unknown.
    """
    row = extra_info["reasoning_gym"]
    if row["extract"] not in EXTRACTORS:
        extractors = ", ".join(EXTRACTORS)
        raise ValueError(f"extra_info.reasoning_gym.extract is {row['extract']!r}; choose one of {extractors}")
    answer = EXTRACTORS[row["extract"]](solution_str)
    if answer is None:
        return 0.0
    dataset = _dataset(row["task"], json.dumps(row["params"], sort_keys=True))
    task = row["entry"]["metadata"]["source_dataset"] if row["task"] == "composite" else row["task"]
    points = _points(dataset, task, answer, row["entry"])
    # Most scorers give partial credit to a text that contains the answer. This makes no sense for a number or a word:
    # 13 would get half the points of 3.
    return float(points >= 1.0) if row["extract"] in ("last_number", "first_word") else points


@lru_cache(maxsize=256)
def _dataset(task: str, params: str) -> ProceduralDataset:
    """Return the dataset that has the scorer. Nothing is generated, so its size and seed do not matter."""
    return reasoning_gym.create_dataset(task, **{**json.loads(params), "size": 1, "seed": 0})


def _points(dataset: ProceduralDataset, task: str, answer: str, entry: Any) -> float:
    if answer == entry["answer"]:
        return float(dataset.score_answer(answer, entry))
    if not may_be_scored(task, answer):
        return float(dataset.score_answer(_EMPTY, entry))
    score_answer = partial(bounded, dataset.score_answer) if task in UNBOUNDED_TASKS else dataset.score_answer
    try:
        points = float(score_answer(answer, entry))
        return points if points < 1.0 or is_right(task, answer, entry) else 0.0
    except BoundedProcessKilled:
        raise
    except Exception:  # noqa: BLE001 - the package may raise anything on a policy's answer
        dataset.score_answer(entry["answer"], entry)  # raises, too, if the row is invalid
        return float(dataset.score_answer(_EMPTY, entry))
