"""Control tokens inside messages: by default a question that contains ``<|im_end|>`` ends the user's turn.

A tokenizer maps the text of a control token to that token, whoever wrote it. To read it as text, a mark is inserted
into it before the template is applied. The rendered text is then split at the control tokens of the template, and each
section in between is tokenized without the mark and with control tokens disabled.

Control tokens are the special tokens, and other added tokens in the template (Qwen's ``</tool_response>``). Tokenizers
cannot disable the latter, so they are tokenized in two halves.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tether.batch import TokenIds
from tether.text.data.chat import tokenize
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\uf4c3\ue6a9"
"""Default mark, for text that is marked before its context is known."""
_PRIVATE_USE = range(0xE000, 0xF900)
"""Unicode characters without a meaning."""


class ControlTokens:
    """The control tokens of a tokenizer, and how messages with such tokens are tokenized.

    Args:
        tokenizer: the policy's.
        chat_template: a Jinja template to use instead of the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        template, added = chat_template or str(tokenizer.chat_template), tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens} - {""}
        written = {t.content for t in added if len(t.content.strip()) > 1 and t.content in template} - special
        tokens = sorted(special | written, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")  # longest first; (?!) never matches
        inside = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in written)
        self._cut = re.compile("|".join(inside) or r"(?!)")

    def inside(self, messages: Sequence[Message]) -> set[str]:
        """Return the control tokens that messages contain."""
        return {token for message in messages for token in self._pattern.findall(message["content"])}

    def broken(self, messages: Sequence[Message]) -> tuple[list[JsonObject], str]:
        """Return the messages with a mark inserted into each control token, and the mark."""
        text = "".join(message["content"] for message in messages)
        mark = next(character for character in map(chr, _PRIVATE_USE) if character not in text)
        return [{**m, "content": self.as_text(m["content"], mark)} for m in messages], mark

    def as_text(self, text: str, mark: str = MARK, spared: Container[str] = ()) -> str:
        """Return the text with a mark after the first character of each control token that is not `spared`."""

        def broken(match: re.Match[str]) -> str:
            return match[0] if match[0] in spared else match[0][0] + mark + match[0][1:]

        return self._pattern.sub(broken, text)

    def tokenize(self, text: str) -> TokenIds:
        """Return the token ids of a rendered text that may contain output of `as_text`."""
        return self.tokenize_broken(text, MARK) if MARK in text else tokenize([text], self._tokenizer)[0]

    def tokenize_broken(self, text: str, mark: str) -> TokenIds:
        """Return the token ids of a rendered text, reading marked control tokens as text."""
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(text):
            ids += [*self._as_text(text[position : match.start()].replace(mark, "")), self._id_of(match[0])]
            position = match.end()
        return np.array([*ids, *self._as_text(text[position:].replace(mark, ""))], dtype=np.int32)

    def _as_text(self, text: str) -> list[int]:
        texts = [text_ids for text_ids in self._cut.split(text) if text_ids]
        if not texts:
            return []
        ids = self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [token for text_ids in ids for token in text_ids]

    def _id_of(self, token: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id
