"""Conversations whose assistant messages are trained on: the rows of supervised fine-tuning. Imports no torch.

A row has `messages`, a list of {role, content}; or `prompt`, such a list or the text of a user message, and `response`,
the assistant's text. The configuration names the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tether.text.data.columns import Columns
from tether.text.data.config import DataConfig
from tether.text.data.location import expand, locate
from tether.text.data.rows import RowSource, half_characters, prompt_problems, raise_problems
from tether.text.data.sources import read_source
from tether.types import JsonObject

_CONVERSATIONS = ("messages", "conversations", "conversation", "dialogue", "chat", "turns")
_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
_RESPONSES = ("response", "completion", "answer", "output", "solution", "target", "chosen")


@dataclass(frozen=True)
class ChatRow:
    """A conversation with at least one assistant message."""

    messages: tuple[JsonObject, ...]
    place: str
    """File and row, for error messages."""


def load_chats(data: DataConfig, files: Sequence[str], first: int | None = None) -> list[ChatRow]:
    """Read the conversations of files and hub datasets, at most `first` rows of each file.

    Raises:
        ValueError: a source is missing or unreadable, or rows are not conversations; lists up to ten problems.
    """
    columns = Columns(data.prompt_key, answer=data.response_key, others=(data.messages_key,))
    rows: list[ChatRow] = []
    problems: list[str] = []
    for spec in (spec for name in files for spec in expand(name)):
        if locate(spec).kind not in ("file", "hub"):
            raise ValueError(f"{spec}: has no responses to learn from; give a file or a hub dataset with conversations")
        source = read_source(spec, columns, first)
        problem = _layout_problem(source, data)
        problems += [problem] if problem else []
        for index in range(0 if problem else len(source.records)):
            place, record = f"{source.name} row {index}", source.records[index]
            row_problems = list(_problems(record, source, data))
            problems += [f"{place}: {one}" for one in row_problems]
            if not row_problems and isinstance(record, Mapping):
                rows.append(ChatRow(_messages(record, source, data), place))
    raise_problems(problems)
    return rows


def _layout_problem(source: RowSource, data: DataConfig) -> str | None:
    """Return why a source is unusable: it has no rows, or lacks the columns of a conversation; otherwise None."""
    if not len(source.records):
        return f"{source.name}: no rows. Name a file with at least one, or take it off the list."
    if data.messages_key in source.keys or {source.columns.prompt, source.columns.answer} <= {*source.keys}:
        return None
    conversation = next((key for key in _CONVERSATIONS if key in source.keys), None)
    prompt, response = (
        next((key for key in usual if key in source.keys), "COLUMN") for usual in (_PROMPTS, _RESPONSES)
    )
    named = f"data.prompt_key={prompt} data.response_key={response}"
    return (
        f"{source.name}: no `{data.messages_key}` (data.messages_key), and not both `{source.columns.prompt}` "
        f"(data.prompt_key) and `{source.columns.answer}` (data.response_key); its keys are "
        f"{', '.join(source.keys)}. Name its columns: {f'data.messages_key={conversation}' if conversation else named}"
    )


def _problems(record: object, source: RowSource, data: DataConfig) -> Iterator[str]:
    """Yield every reason why a raw row is not a conversation to train on."""
    if not isinstance(record, Mapping):
        yield f"a {type(record).__name__}, not an object with keys."
        return
    key = data.messages_key if record.get(data.messages_key) is not None else source.columns.prompt
    conversation = record.get(key)
    problems = list(prompt_problems(conversation, key))
    yield from problems
    if isinstance(conversation, str | list):
        yield from half_characters(conversation, key)
    if key == source.columns.prompt:
        response = record.get(source.columns.answer or "")
        if not isinstance(response, str) or not response:
            yield f"`{source.columns.answer}` is {response!r:.80}, not a text. It is the assistant's message."
        else:
            yield from half_characters(response, str(source.columns.answer))
    elif isinstance(conversation, str):
        yield f"`{key}` is a text. Give a list of {{role, content}}."
    elif not problems and not any(message["role"] == "assistant" for message in conversation or ()):
        yield f"`{key}` has no message of the role assistant, so there is nothing to learn."


def _messages(record: Mapping[str, object], source: RowSource, data: DataConfig) -> tuple[JsonObject, ...]:
    messages = record.get(data.messages_key)
    if messages is None:
        prompt, response = record[source.columns.prompt], record[source.columns.answer or ""]
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        assert isinstance(before, list)
        messages = [*before, {"role": "assistant", "content": response}]
    assert isinstance(messages, list)
    # A parquet struct has all messages' keys, null where missing, but templates test whether a key exists.
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)
