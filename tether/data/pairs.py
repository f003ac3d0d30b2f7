"""Pairs of responses of which one is preferred: what a reward model learns from.

A row has `chosen` and `rejected`, each a conversation (a list of {role, content}) or a text; with `prompt`, a
conversation or the user's message, they are what follows it. Conversations that both begin with the prompt themselves,
as in UltraFeedback, are left as they are. Texts without a prompt stand as they are, and are read without a chat
template, as in Anthropic's hh-rlhf.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from tether.data.chat import tokenize, write_conversation
from tether.data.columns import Columns
from tether.data.location import locate
from tether.data.rows import half_characters, raise_problems
from tether.data.sources import READERS
from tether.types import JsonObject, Message

Side = str | list[JsonObject]
"""A text, or a conversation."""
SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """Two responses to the same prompt."""

    chosen: Side
    rejected: Side
    place: str
    """File and row, for messages."""

    @property
    def prompt(self) -> str:
        """The prompt of both answers; where they are texts, the chosen one stands for it."""
        return json.dumps(self.chosen[:-1] if isinstance(self.chosen, list) else self.chosen)


def load_pairs(files: Sequence[str]) -> list[Pair]:
    """Read the pairs of parquet, json and jsonl files.

    Raises:
        ValueError: a file that is missing or unreadable, or rows that are no pairs; up to ten, by file and row.
    """
    pairs: list[Pair] = []
    problems: list[str] = []
    for name in files:
        found = locate(name)
        if found.kind != "file":
            raise ValueError(f"{name}: is no file of pairs; give a .jsonl, .json or .parquet file")
        records = READERS[Path(found.name).suffix](Path(found.name), Columns(), None).records
        for number in range(len(records)):
            place, record = f"{name} row {number}", records[number]
            wrong = list(pair_problems(record))
            problems += [f"{place}: {problem}" for problem in wrong]
            if not wrong and isinstance(record, Mapping):
                pairs.append(Pair(*_sides(record), place))
    raise_problems(problems)
    if not pairs:
        raise ValueError(f"{', '.join(files)}: no pairs; each row needs `chosen` and `rejected`")
    return pairs


def pair_ids(pair: Pair, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids of the chosen and of the rejected side.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation.
    """
    try:
        texts = [side if isinstance(side, str) else _written(side, tokenizer) for side in (pair.chosen, pair.rejected)]
    except ValueError as error:
        raise ValueError(f"{pair.place}: {error}") from error
    chosen, rejected = tokenize(texts, tokenizer)
    return chosen.tolist(), rejected.tolist()


def _written(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"is a conversation, and the tokenizer of {tokenizer.name_or_path} has no chat template. Take the chat "
            "(instruct) version of the model, or give `chosen` and `rejected` as texts without `prompt`."
        )
    return write_conversation(messages, tokenizer)


def _sides(record: Mapping[str, Any]) -> tuple[Side, Side]:
    chosen, rejected = (side if isinstance(side, str) else list(side) for side in (record[name] for name in SIDES))
    prompt = record.get("prompt")
    if prompt is None:
        return chosen, rejected
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if all(_begins_with(side, before) for side in (chosen, rejected)):
        return chosen, rejected
    chosen, rejected = (
        [*before, *([{"role": "assistant", "content": side}] if isinstance(side, str) else side)]
        for side in (chosen, rejected)
    )
    return chosen, rejected


def _begins_with(side: Side, before: Sequence[Message]) -> bool:
    """Whether a conversation starts with the prompt; a system message may stand in front that the prompt lacks."""
    if isinstance(side, str):
        return False
    if before[0]["role"] != "system":
        side = list(dropwhile(lambda message: message["role"] == "system", side))
    shown = [[(message["role"], message["content"]) for message in part] for part in (side, before)]
    return len(side) > len(before) and shown[0][: len(before)] == shown[1]


def pair_problems(record: object) -> Iterator[str]:
    """Everything by which a raw row is no pair."""
    if not isinstance(record, Mapping):
        yield "is no object with `chosen` and `rejected`"
        return
    prompt = record.get("prompt")
    if not (prompt is None or isinstance(prompt, str) or _is_conversation(prompt)):
        yield "`prompt` is neither text nor a list of {role, content}"
    elif prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
        yield "`prompt` is empty; write null, or leave it out, where both sides stand alone"
    for key in ("prompt", *SIDES):
        if isinstance(value := record.get(key), str | list):
            yield from half_characters(value, key)
    for side in SIDES:
        value = record.get(side)
        if not (value.strip() if isinstance(value, str) else value):
            yield f"has no `{side}`, so nothing is compared"
        elif not isinstance(value, str) and not _is_conversation(value):
            yield f"`{side}` is neither text nor a list of {{role, content}}"
        elif not isinstance(value, str) and (last := value[-1]["role"]) != "assistant":
            yield f"`{side}` ends with a message of the role {last}, and what is compared is the assistant's"
    if not prompt and {type(record.get(side)) for side in SIDES} == {str, list}:
        yield "one of `chosen` and `rejected` is a text, the other is not; write both alike, or give a `prompt`"
    chosen, rejected = (record.get(side) for side in SIDES)
    if chosen and rejected and _asked(chosen) != _asked(rejected):
        yield "`chosen` and `rejected` differ before the assistant's first message: they answer different prompts"
    if all(record.get(side) for side in SIDES) and record["chosen"] == record["rejected"]:
        yield "`chosen` and `rejected` are the same, so nothing is preferred; leave it out"


def _asked(side: object) -> list[Message]:
    """The messages of a conversation before the assistant's first."""
    return list(takewhile(lambda message: message["role"] != "assistant", side)) if _is_conversation(side) else []


def _is_conversation(value: object) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
