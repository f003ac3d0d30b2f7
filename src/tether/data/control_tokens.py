"""Control tokens inside messages: a question that holds ``<|im_end|>`` ends the user's turn, unless told otherwise.

A tokenizer reads the text of a control token as that token, whoever wrote it. To read it as text, it is broken by a
mark before the template is applied; the rendered text is then cut at the control tokens that the template wrote, and
each part in between is tokenized without the mark and with control tokens switched off.

Control tokens are the special ones, and others that the template writes (Qwen's ``</tool_response>``): tokenizers
cannot switch the latter off, so that they are tokenized in two pieces.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tether.batch import TokenIds
from tether.data.chat import tokenize
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\uf4c3\ue6a9"
"""Breaks control tokens where a text is marked before it is known what stands around it."""
_PRIVATE_USE = range(0xE000, 0xF900)
"""Characters that mean nothing in Unicode."""


class ControlTokens:
    """The control tokens of a tokenizer, and what messages hold of them.

    Args:
        tokenizer: of the policy.
        chat_template: a Jinja template instead of the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        template, added = chat_template or str(tokenizer.chat_template), tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens} - {""}
        written = {t.content for t in added if len(t.content.strip()) > 1 and t.content in template} - special
        tokens = sorted(special | written, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")  # the longest first; (?!): none
        inside = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in written)
        self._cut = re.compile("|".join(inside) or r"(?!)")

    def inside(self, messages: Sequence[Message]) -> set[str]:
        """The control tokens that stand in messages."""
        return {token for message in messages for token in self._pattern.findall(message["content"])}

    def broken(self, messages: Sequence[Message]) -> tuple[list[JsonObject], str]:
        """The messages with a mark after the first character of each control token in them, and the mark."""
        text = "".join(message["content"] for message in messages)
        mark = next(character for character in map(chr, _PRIVATE_USE) if character not in text)
        return [{**m, "content": self.as_text(m["content"], mark)} for m in messages], mark

    def as_text(self, text: str, mark: str = MARK, spared: Container[str] = ()) -> str:
        """The text with a mark after the first character of each control token in it, but those that are spared."""

        def broken(found: re.Match[str]) -> str:
            return found[0] if found[0] in spared else found[0][0] + mark + found[0][1:]

        return self._pattern.sub(broken, text)

    def tokenize(self, text: str) -> TokenIds:
        """Token ids of a rendered text, parts of which may have gone through `as_text`."""
        return self.tokenize_broken(text, MARK) if MARK in text else tokenize([text], self._tokenizer)[0]

    def tokenize_broken(self, text: str, mark: str) -> TokenIds:
        """Token ids of a rendered text: broken control tokens are text, all others are control tokens."""
        ids: list[int] = []
        position = 0
        for found in self._pattern.finditer(text):
            ids += [*self._as_text(text[position : found.start()].replace(mark, "")), self._id_of(found[0])]
            position = found.end()
        return np.array([*ids, *self._as_text(text[position:].replace(mark, ""))], dtype=np.int32)

    def _as_text(self, text: str) -> list[int]:
        pieces = [piece for piece in self._cut.split(text) if piece]
        if not pieces:
            return []
        ids = self._tokenizer(pieces, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [token for piece in ids for token in piece]

    def _id_of(self, token: str) -> int:
        number = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(number, int)
        return number
