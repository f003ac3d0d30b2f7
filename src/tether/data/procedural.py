"""Rows made on the spot by a reasoning-gym task: ``reasoning_gym:task?key=value&...``.

Keys are those of the task's own configuration (numbers, true/false and json lists are read as such, all else is
text), with `seed` 0 where it is not given so that a run can be repeated, and four that are ours:

    system    text of a system message before the question
    suffix    text that follows the question, as it is: begin it with the space or line break that it needs
    extract   what of the reply is scored: `last_number`, `first_word`, `answer_tag` (between <answer> and
              </answer>, else the whole reply; the default) or `full`
    part      `train` or `test`: a fifth of all possible questions, chosen by their hash, is test and never train,
              whatever the seeds. `size` counts what is left of a part; of `test` it counts distinct questions, each
              of which appears once. Without `part`, two seeds of a small task share questions

Values are url-encoded: %20 for a space, %0A for a line break, %2B for a plus.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tether.data.rows import Source
from tether.spelling import did_you_mean

EXTRACTS = ("answer_tag", "last_number", "first_word", "full")
PARTS = ("train", "test")
TEST_SHARE = 5  # one question in so many is test
OWN_OPTIONS = ("system", "suffix", "extract", "part")


def read_task(spec: str, task: str, options: Mapping[str, str]) -> Source:
    """Generate the rows of a task; row i is the task's entry i.

    Each row's `extra_info` holds what its scorer is rebuilt from, under `reasoning_gym`: the `task`, its `params`,
    the `entry` (question, answer, metadata; as generated: a trip through json would turn number keys into text and
    mislead some scorers) and `extract`. The style is `verifier`, since some tasks accept many answers and have no
    `ground_truth`.

    Raises:
        ValueError: an unknown task, parameter or extraction, or parameters that the task refuses.
    """
    if task not in DATASETS:
        raise ValueError(f"{spec}: reasoning-gym has no task `{task}`.{did_you_mean(task, list(DATASETS))}")
    extract = options.get("extract", EXTRACTS[0])
    if extract not in EXTRACTS:
        raise ValueError(f"{spec}: extract is `{extract}`; it may be {', '.join(EXTRACTS)}.")
    part = options.get("part")
    if part not in (None, *PARTS):
        raise ValueError(f"{spec}: part is `{part}`; it may be {', '.join(PARTS)}.")
    params = {"seed": 0} | {key: _parse(text) for key, text in options.items() if key not in OWN_OPTIONS}
    known = [field.name for field in fields(DATASETS[task][1])]
    for key in params:
        if key not in known:
            raise ValueError(
                f"{spec}: `{task}` has no parameter `{key}`; it has {', '.join(known)}.{did_you_mean(key, known)}"
            )
    if not isinstance(size := params.get("size", 1), int):
        raise ValueError(f"{spec}: size is `{size}`; it is a number of questions.")
    try:
        entries = _entries(task, params, part)
    except (AssertionError, TypeError, ValueError) as error:  # how the tasks' configurations refuse a value
        raise ValueError(f"{spec}: `{task}` refuses its parameters: {error}") from error
    if part == "test" and len(entries) < params.get("size", len(entries)):
        raise ValueError(
            f"{spec}: {params['size']} distinct test questions are asked for and only {len(entries)} were found. "
            "Lower size, or change the task's parameters so that it has more questions."
        )
    before = [{"role": "system", "content": options["system"]}] if "system" in options else []
    records = [
        {
            "data_source": f"reasoning_gym/{task}",
            "prompt": [*before, {"role": "user", "content": entry["question"] + options.get("suffix", "")}],
            "ability": "reasoning",
            "reward_model": {"style": "verifier", "ground_truth": entry["answer"]},
            "extra_info": {
                "split": part or "generated",
                "index": index,
                "reasoning_gym": {"task": task, "params": params, "entry": entry, "extract": extract},
            },
        }
        for index, entry in enumerate(entries)
    ]
    return Source(spec, records, (), generated=True)


def _entries(task: str, params: dict[str, Any], part: str | None) -> list[dict[str, Any]]:
    """As many entries of the part as `size` asks for, distinct ones of `test`; of a small task, as many as it has."""
    dataset = reasoning_gym.create_dataset(task, **params)
    if part is None:
        return list(dataset)
    wanted = len(dataset)
    attempts = 4 * TEST_SHARE * wanted
    try:
        dataset[attempts - 1]
    except IndexError:  # most tasks make an entry of any index, some only those that they were made with
        dataset = reasoning_gym.create_dataset(task, **params | {"size": attempts})
    drawn = (dataset[index] for index in range(attempts))
    of_part = (entry for entry in drawn if _part_of(entry["question"]) == part)
    return list(itertools.islice(_distinct(of_part) if part == "test" else of_part, wanted))


def _distinct(entries: Iterable[dict[str, object]]) -> Iterator[dict[str, object]]:
    seen = set()
    for entry in entries:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry


def _part_of(question: str) -> str:
    is_test = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) % TEST_SHARE == 0
    return PARTS[is_test]


def _parse(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
