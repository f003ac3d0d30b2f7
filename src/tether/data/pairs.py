"""Pairs of responses of which one is preferred: what a reward model learns from.

A row has `chosen` and `rejected`, each a conversation (a list of {role, content}) or a text; with `prompt`, a
conversation or the user's message, they are what follows it. What both conversations repeat of it, all of it as in
UltraFeedback or its last messages, is read once. Texts without a prompt stand as they are, and are read without a chat
template, as in Anthropic's hh-rlhf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from tether.data.chat import tokenize, write_conversation
from tether.data.columns import Columns
from tether.data.location import expand, locate
from tether.data.rows import half_characters, raise_problems
from tether.data.sources import READERS
from tether.runtime.terminal import shortened
from tether.types import JsonObject, Message

Side = str | list[JsonObject]
"""A text, or a conversation."""
SIDES = ("chosen", "rejected")
ECHO = 20
"""Characters of a prompt with which no two answers begin by chance; a shorter one may be a greeting."""
TURN = re.compile(r"\n\n(Human|Assistant):")
"""The beginning of a turn in texts such as hh-rlhf's."""


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
    for name in (one for spec in files for one in expand(spec)):
        found = locate(name)
        if found.kind != "file":
            raise ValueError(f"{name}: is no file of pairs; give a .jsonl, .json or .parquet file")
        if found.options:
            raise ValueError(f"{name}: a file of pairs has no options; call its columns prompt, chosen and rejected")
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


def pair_ids(
    pair: Pair, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of the chosen and of the rejected side.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses a conversation.
    """
    try:
        texts = [
            side if isinstance(side, str) else _written(side, tokenizer, chat_template)
            for side in (pair.chosen, pair.rejected)
        ]
    except ValueError as error:
        raise ValueError(f"{pair.place}: {error}") from error
    chosen, rejected = tokenize(texts, tokenizer)
    return chosen.tolist(), rejected.tolist()


def _written(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"is a conversation, and the tokenizer of {tokenizer.name_or_path} has no chat template. Take the chat "
            "(instruct) version of the model, or give `chosen` and `rejected` as texts without `prompt`."
        )
    return write_conversation(messages, tokenizer, chat_template=chat_template)


def _sides(record: Mapping[str, Any]) -> tuple[Side, Side]:
    chosen, rejected = (side if isinstance(side, str) else list(side) for side in (record[name] for name in SIDES))
    prompt = record.get("prompt")
    if prompt is None:
        return chosen, rejected
    before = _conversation(prompt)
    repeated = _repeated(chosen, before)  # as by the other side: `pair_problems` has seen to that
    if repeated == len(before):
        return chosen, rejected
    before = before[: len(before) - repeated]
    chosen, rejected = (
        [*before, *([{"role": "assistant", "content": side}] if isinstance(side, str) else side)]
        for side in (chosen, rejected)
    )
    return chosen, rejected


def _conversation(prompt: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _repeated(side: object, before: Sequence[Message]) -> int:
    """Messages, the last ones of the prompt, that a conversation begins with.

    Of a conversation that begins with the whole prompt, a system message may come first that the prompt does not have.
    """
    if not _is_conversation(side):
        return 0
    bare = side if before[0]["role"] == "system" else list(dropwhile(lambda m: m["role"] == "system", side))
    if _same(bare[: len(before)], before) and len(bare) > len(before):
        return len(before)
    counts = range(min(len(before), len(side) - 1), 0, -1)
    return next((count for count in counts if _same(side[:count], before[-count:])), 0)


def _same(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    shown = [[(message["role"], message["content"].strip()) for message in part] for part in (messages, others)]
    return shown[0] == shown[1]


def _repetitions(prompt: str | Sequence[Message], record: Mapping[str, Any]) -> Iterator[str]:
    """Where the sides repeat of the prompt what would be read twice, or may do so."""
    before = _conversation(prompt)
    sides: list[Any] = [record.get(name) for name in SIDES]
    chosen, rejected = (_repeated(side, before) for side in sides)
    if chosen != rejected:
        counts = f"`chosen` repeats {chosen} and `rejected` {rejected}"
        yield f"of the last messages of `prompt` {counts}; leave them out of both"
    elif not chosen and before[-1]["role"] == "user" and _is_conversation(sides[0]):
        first = sides[0][0]["role"] if sides[0] else ""
        if another := {"user": "another one", "system": "one of the role system"}.get(first):
            yield (
                f"`prompt` ends with a message of the user, and `chosen` begins with {another}; leave out of the sides "
                "what is before the answer, or take `prompt` out of the row"
            )
    elif all(isinstance(side, str) for side in sides) and (echo := _echo(before[-1]["content"], sides)):
        yield (
            f"`chosen` and `rejected` begin with {shortened(echo, 60)!r}, with which `prompt` ends, and it would be "
            "read twice; leave it out of them, or, where it is part of the answers, write these as "
            "[{role: assistant, content}]"
        )


def _echo(prompt: str, sides: Sequence[str]) -> str | None:
    """The beginning of both texts that repeats the prompt, unless that is as short as a greeting, or its last turns."""
    turns = (prompt[turn.start() :].strip() for turn in TURN.finditer(prompt))
    whole = [prompt.strip()] if len(prompt) >= ECHO else []
    return next((part for part in (*whole, *turns) if all(side.lstrip().startswith(part) for side in sides)), None)


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
    elif prompt is not None:
        yield from _repetitions(prompt, record)
    for key in ("prompt", *SIDES):
        if isinstance(value := record.get(key), str | list):
            yield from half_characters(value, key)
    for side in SIDES:
        value = record.get(side)
        if not (value.strip() if isinstance(value, str) else value):
            keys = "" if side in record else f"; its keys are {', '.join(map(str, record)) or 'none'}"
            yield f"has no `{side}`, so nothing is compared{shortened(keys, 200)}"
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
