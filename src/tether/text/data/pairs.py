"""Preference pairs: the training data of a reward model.

A row has `chosen` and `rejected`, each a conversation (a list of {role, content}) or a text. If it also has `prompt`, a
conversation or the text of a user message, both continue it; messages of the prompt that both conversations repeat (all
of them, as in UltraFeedback, or the last ones) are used once. Texts without a prompt are used verbatim, without a chat
template, as in Anthropic's hh-rlhf. A number in `margin` is the amount by which the chosen score should exceed the
rejected one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from tether.runtime.terminal import shortened
from tether.text.data.columns import Columns
from tether.text.data.location import expand, locate
from tether.text.data.prompts import tokenize, write_conversation
from tether.text.data.rows import half_characters, raise_problems
from tether.text.data.sources import READERS
from tether.types import JsonObject, Message

Side = str | list[JsonObject]
"""A text or a conversation."""
SIDES = ("chosen", "rejected")
ECHO = 20
"""Minimum length of a prompt that two answers do not both begin with by chance; a shorter one may be a greeting."""
TURN = re.compile(r"\n\n(Human|Assistant):")
"""The start of a turn in texts such as those of hh-rlhf."""


@dataclass(frozen=True)
class Pair:
    """Two responses to the same prompt, of which one is preferred."""

    chosen: Side
    rejected: Side
    place: str
    """File and row, for error messages."""
    margin: float = 0.0
    """Amount by which the chosen score should exceed the rejected one."""

    @property
    def prompt(self) -> str:
        """The prompt of both responses; if the pair consists of texts, the chosen text."""
        return json.dumps(self.chosen[:-1] if isinstance(self.chosen, list) else self.chosen)


def load_pairs(files: Sequence[str]) -> list[Pair]:
    """Read the pairs of parquet, json and jsonl files.

    Raises:
        ValueError: a file is missing or unreadable, or rows are not pairs; lists up to ten rows.
    """
    pairs: list[Pair] = []
    problems: list[str] = []
    for name in (one for spec in files for one in expand(spec)):
        location = locate(name)
        if location.kind != "file":
            raise ValueError(f"{name}: is no file of pairs; give a .jsonl, .json or .parquet file")
        if location.options:
            raise ValueError(f"{name}: a file of pairs has no options; call its columns prompt, chosen and rejected")
        records = READERS[Path(location.name).suffix](Path(location.name), Columns(), None).records
        for index in range(len(records)):
            place, record = f"{name} row {index}", records[index]
            wrong = list(pair_problems(record))
            problems += [f"{place}: {problem}" for problem in wrong]
            if not wrong and isinstance(record, Mapping):
                pairs.append(Pair(*_sides(record), place, float(record.get("margin") or 0.0)))
    raise_problems(problems)
    if not pairs:
        raise ValueError(f"{', '.join(files)}: no pairs; each row needs `chosen` and `rejected`")
    return pairs


def pair_ids(
    pair: Pair, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids of the chosen and of the rejected side.

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
    repeated = _repeated(chosen, before)  # `pair_problems` has checked that both sides repeat the same messages
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
    """Return how many of the prompt's last messages a conversation starts with.

    A conversation that starts with the full prompt may have an additional system message in front.
    """
    if not _is_conversation(side):
        return 0
    bare = side if before[0]["role"] == "system" else list(dropwhile(lambda m: m["role"] == "system", side))
    if _same(bare[: len(before)], before) and len(bare) > len(before):
        return len(before)
    counts = range(min(len(before), len(side) - 1), 0, -1)
    return next((count for count in counts if _same(side[:count], before[-count:])), 0)


def _same(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    shown = [
        [(message["role"], message["content"].strip()) for message in conversation]
        for conversation in (messages, others)
    ]
    return shown[0] == shown[1]


def _repetitions(prompt: str | Sequence[Message], record: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with prompt text that the sides repeat, which would therefore be used twice."""
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
    """Return the prompt, or its last turns, if both texts begin with it; a prompt as short as a greeting does not
    count.
    """
    turns = (prompt[turn.start() :].strip() for turn in TURN.finditer(prompt))
    full_prompt = [prompt.strip()] if len(prompt) >= ECHO else []
    return next(
        (
            candidate
            for candidate in (*full_prompt, *turns)
            if all(side.lstrip().startswith(candidate) for side in sides)
        ),
        None,
    )


def pair_problems(record: object) -> Iterator[str]:
    """Yield every reason why a raw row is not a pair."""
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
    margin = record.get("margin")
    if margin is not None and not (type(margin) in (int, float) and math.isfinite(margin)):
        yield f"`margin` is {shortened(repr(margin), 60)}, not a finite number; write null, or rename the column"
    chosen, rejected = (record.get(side) for side in SIDES)
    if chosen and rejected and _messages_before_answer(chosen) != _messages_before_answer(rejected):
        yield "`chosen` and `rejected` differ before the assistant's first message: they answer different prompts"
    if all(record.get(side) for side in SIDES) and record["chosen"] == record["rejected"]:
        yield "`chosen` and `rejected` are the same, so nothing is preferred; leave it out"


def _messages_before_answer(side: object) -> list[Message]:
    """Return the messages of a conversation before the assistant's first one."""
    return list(takewhile(lambda message: message["role"] != "assistant", side)) if _is_conversation(side) else []


def _is_conversation(value: object) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
