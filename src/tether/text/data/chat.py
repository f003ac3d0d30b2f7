"""Conversations to token ids: applying the chat template, tokenizing and truncating."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from tether.batch import TokenIds
from tether.runtime.deadline import deadline, memory_limit
from tether.text.data.rows import Row
from tether.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_SECONDS = 10.0
"""Timeout for a chat template to render one conversation, in seconds."""
TEMPLATE_BYTES = 2 << 30
"""Memory limit of a chat template, in bytes."""
LONGEST_TEXT = 2**26
"""Maximum characters of a rendered conversation."""
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError,
    TimeoutError, MemoryError,
)  # fmt: skip
"""Errors that expressions in a template can raise."""

TRUNCATIONS: dict[str, Callable[[TokenIds, int], TokenIds]] = {
    "left": lambda ids, length: ids[len(ids) - length :],
    "right": lambda ids, length: ids[:length],
    "middle": lambda ids, length: np.concatenate([ids[: length // 2], ids[len(ids) - (length - length // 2) :]]),
}
"""Truncate to `length` tokens; the key is the side that is removed. `middle` keeps half from each end."""


_TODAY = re.compile(r"""\bstrftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")


def today() -> str:
    """Return today's date as YYYY-MM-DD."""
    return date.today().isoformat()


def dated_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, day: str | None) -> str | None:
    """Return the chat template with a fixed date instead of today's, which templates such as Llama 3.2's contain.

    Args:
        tokenizer: provides the chat template if `chat_template` is None.
        chat_template: a Jinja template to use instead.
        day: YYYY-MM-DD; None leaves the template as it is.

    Returns:
        The template with the date; `chat_template` if it contains none.
    """
    template = chat_template or tokenizer.chat_template
    if day is None or not isinstance(template, str):
        return chat_template
    fixed = date.fromisoformat(day)
    # transformers passes only plain values to a template, no functions.
    dated = _TODAY.sub(lambda call: json.dumps(fixed.strftime(call[2])), template)
    return chat_template if dated == template else dated


def render(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, template_kwargs: Mapping[str, Any]
) -> str:
    """Render a row's conversation as the text that the policy continues.

    Args:
        row: its messages are rendered, followed by the opening of the assistant's turn. If the last message is the
            assistant's, the policy continues it, as in transformers' pipelines.
        tokenizer: provides the chat template if `chat_template` is None.
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
    """Render a conversation with the tokenizer's chat template and the `arguments` of `apply_chat_template`.

    Raises:
        ValueError: the template has a syntax error, refuses the conversation, fails or does not end.
    """
    try:
        with deadline(TEMPLATE_SECONDS), memory_limit(TEMPLATE_BYTES):
            text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **arguments)
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        why = f"it takes more than {TEMPLATE_BYTES / 2**30:g} GiB" if isinstance(error, MemoryError) else error
        raise ValueError(f"the chat template refuses the conversation (roles: {roles}): {why}") from error
    assert isinstance(text, str)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the chat template wrote {len(text)} characters, and {LONGEST_TEXT} are the most")
    return text


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[TokenIds]:
    """Return the token ids of rendered texts. No special tokens are added, because the template contains them."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in encoded]


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = False
) -> str:
    """Return the text of a sequence of token ids."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text
