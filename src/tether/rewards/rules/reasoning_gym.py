"""Procedural tasks of reasoning-gym: each task brings its own scorer, which is rebuilt from the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from tether.rewards.rules.bounded import Ended, bounded
from tether.rewards.rules.extract import answer_tag, first_word, last_number
from tether.rewards.rules.reasoning_answers import WITHOUT_END, is_right, may_be_scored
from tether.types import ExtraInfo


def _whole_reply(text: str) -> str:
    return text.strip()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "last_number": last_number,
    "answer_tag": answer_tag,
    "first_word": first_word,
    "full": _whole_reply,
}

_NOTHING = ""  # an answer that no scorer evaluates


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo) -> float:
    """Score the answer found in the reply with the task's own scorer; 0.0 without an answer.

    `extra_info["reasoning_gym"]` holds "task", "params" (of the dataset), "entry" (question, answer, metadata) and
    "extract" (a key of `EXTRACTORS`).

    Most scorers give part of the points to a text that contains the answer. A number is no such text (13 would earn
    half the points of 3), so a last number is right, 1.0, or wrong, 0.0, and so is a first word.

    What is no answer to the task is scored as an empty one: code where a scorer would run it, what takes a scorer too
    long or makes it raise, and what it would take for right by mistake (`tether.rewards.rules.reasoning_answers`).

    Raises:
        ValueError: an unknown "extract" or task.
    """
    row = extra_info["reasoning_gym"]
    if row["extract"] not in EXTRACTORS:
        known = ", ".join(EXTRACTORS)
        raise ValueError(f"extra_info.reasoning_gym.extract is {row['extract']!r}; choose one of {known}")
    answer = EXTRACTORS[row["extract"]](solution_str)
    if answer is None:
        return 0.0
    dataset = _dataset(row["task"], json.dumps(row["params"], sort_keys=True))
    task = row["entry"]["metadata"]["source_dataset"] if row["task"] == "composite" else row["task"]
    points = _points(dataset, task, answer, row["entry"])
    return float(points >= 1.0) if row["extract"] in ("last_number", "first_word") else points


@lru_cache(maxsize=256)
def _dataset(task: str, params: str) -> ProceduralDataset:
    """The dataset that knows the scorer; it generates nothing, so its size and seed do not matter."""
    return reasoning_gym.create_dataset(task, **{**json.loads(params), "size": 1, "seed": 0})


def _points(dataset: ProceduralDataset, task: str, answer: str, entry: Any) -> float:
    if answer == entry["answer"]:
        return float(dataset.score_answer(answer, entry))
    if not may_be_scored(task, answer):
        return float(dataset.score_answer(_NOTHING, entry))
    scored = partial(bounded, dataset.score_answer) if task in WITHOUT_END else dataset.score_answer
    try:
        points = float(scored(answer, entry))
        return points if points < 1.0 or is_right(task, answer, entry) else 0.0
    except Ended:
        raise
    except Exception:  # noqa: BLE001 - of the package, on what a policy wrote
        dataset.score_answer(entry["answer"], entry)  # raises, too, where the row is at fault
        return float(dataset.score_answer(_NOTHING, entry))
