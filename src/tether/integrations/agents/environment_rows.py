"""Rows of an environment of the `verifiers` library: ``verifiers:NAME?argument=value&...``.

Arguments are those of the environment's ``load_environment``, or since verifiers 0.4 fields of its configuration
(numbers, true/false and JSON are parsed, everything else is text). tether adds two:

    part   `train` (the default) or `eval`: the dataset or the eval_dataset of the environment; not since 0.4
    size   number of rows to use, from the first
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tether.integrations import integration
from tether.text.data.location import ENVIRONMENT, environment_named_by, has_tasksets
from tether.text.data.rows import RowSource
from tether.types import Message

PARTS = ("train", "eval")


def option_value(text: str) -> object:
    """Return the value of an option: parsed as JSON if possible, otherwise the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_environment(spec: str, name: str, options: Mapping[str, str]) -> RowSource:
    """Read the rows of an environment, which replies to responses and scores them.

    Raises:
        ValueError: the environment cannot be loaded, or has no such rows.
    """
    split, size = options.get("part", "train"), options.get("size")
    if split not in PARTS:
        raise ValueError(f"{spec}: part is `{split}`; it may be {', '.join(PARTS)}.")
    if size is not None and not (size.isdecimal() and int(size)):
        raise ValueError(f"{spec}: size is `{size}`, not a whole number above 0.")
    agent = environment_named_by(spec)
    if has_tasksets():
        if "part" in options:
            raise ValueError(f"{spec}: a taskset has no part. Give an option of {name}, such as taskset.split.")
        try:
            tasks = integration("agents", "verifiers_tasks")
        except ImportError as error:
            supported = "pip install 'verifiers>=0.4,<0.5'"
            raise ValueError(
                f"{spec}: the installed version of verifiers differs ({error}). Run: {supported}"
            ) from error
        return tasks.read_tasks(spec, agent.removeprefix(ENVIRONMENT), int(size) if size else None)
    adapter = integration("agents", "verifiers_environment")
    environment = adapter.load(agent.removeprefix(ENVIRONMENT))
    table = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    if table is None:
        raise ValueError(f"{spec}: the environment has no {'dataset' if split == 'train' else 'eval_dataset'}.")
    tools = adapter.tools_of(environment)
    rows = table.select(range(min(int(size), len(table)))) if size else table
    records = [
        {
            "data_source": f"verifiers/{name}",
            "prompt": _messages(row["prompt"], spec),
            "reward_model": {"style": "verifier", "ground_truth": row.get("answer")},
            "agent_name": agent,
            "extra_info": {
                "split": split,
                "index": index,
                "verifiers": {"row": {key: row[key] for key in row if key != "prompt"}, "tools": tools},
            },
        }
        for index, row in enumerate(rows)
    ]
    return RowSource(spec, records, ())


def _messages(prompt: object, spec: str) -> list[Message]:
    """Return the prompt of a row, without the nulls that tables have for keys that only other messages have."""
    if not isinstance(prompt, list):
        raise ValueError(f"{spec}: the environment asks for the continuation of a text; tether answers messages.")
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]
