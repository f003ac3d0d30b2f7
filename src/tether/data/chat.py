"""Conversations to token ids: the chat template, applied once, and cutting to a length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from tether.batch import TokenIds
from tether.data.rows import Row
from tether.runtime.deadline import deadline
from tether.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_SECONDS = 10.0
"""Seconds that a chat template may take to write one conversation."""
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError,
    TimeoutError,
)  # fmt: skip
"""Errors that the expressions of a template raise."""

TRUNCATIONS: dict[str, Callable[[TokenIds, int], TokenIds]] = {
    "left": lambda ids, length: ids[len(ids) - length :],
    "right": lambda ids, length: ids[:length],
    "middle": lambda ids, length: np.concatenate([ids[: length // 2], ids[len(ids) - (length - length // 2) :]]),
}
"""Cuts to `length` tokens; each is named by what is cut away. `middle` keeps half from each end."""


_TODAY = re.compile(r"""\bstrftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")


def today() -> str:
    """Return today's date as YYYY-MM-DD."""
    return date.today().isoformat()


def dated_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, day: str | None) -> str | None:
    """Return the chat template with a fixed date in the place of today's, which templates such as Llama 3.2's write.

    Args:
        tokenizer: whose chat template is used when `chat_template` is None.
        chat_template: a Jinja template to use instead.
        day: YYYY-MM-DD; None leaves the template as it is.

    Returns:
        The dated template; `chat_template` where it writes no date.
    """
    template = chat_template or tokenizer.chat_template
    if day is None or not isinstance(template, str):
        return chat_template
    fixed = date.fromisoformat(day)
    # A function cannot be passed into a template: transformers passes plain values alone.
    dated = _TODAY.sub(lambda call: json.dumps(fixed.strftime(call[2])), template)
    return chat_template if dated == template else dated


def render(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, template_kwargs: Mapping[str, Any]
) -> str:
    """Write a row's conversation as the text that the policy continues.

    Args:
        row: its messages are rendered, and the opening of the assistant's turn is added. Where the last message is the
            assistant's, the policy continues it, as in transformers' pipelines.
        tokenizer: whose chat template is used when `chat_template` is None.
        chat_template: a Jinja template to use instead.
        template_kwargs: further variables of the template, for example ``{"enable_thinking": False}``.

    Raises:
        ValueError: there is no template, or it has a syntax error, refuses the conversation (some allow no
            system message), fails or does not end.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template, so conversations can't be written as "
            "tokens. Take the model's chat (instruct) version, or give a Jinja template with data.chat_template."
        )
    continues = row.messages[-1].get("role") == "assistant"
    opening = {"add_generation_prompt": not continues, "continue_final_message": continues}
    arguments = {**opening, "chat_template": chat_template, **template_kwargs}
    try:
        return write_conversation(row.messages, tokenizer, **arguments)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}. Change the row, or the template with data.chat_template.") from error


def write_conversation(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> str:
    """Write a conversation as the tokenizer's chat template does, or as `arguments` ask it to.

    Raises:
        ValueError: the template has a syntax error, refuses the conversation, fails or does not end.
    """
    try:
        with deadline(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **arguments)
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(f"the chat template refuses the conversation (roles: {roles}): {error}") from error
    assert isinstance(text, str)
    return text


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[TokenIds]:
    """Token ids of rendered texts; no special token is added, since the template writes those that it wants."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in encoded]


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = False
) -> str:
    """Text of one sequence of token ids."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text
