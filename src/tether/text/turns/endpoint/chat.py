"""Translation between the messages of requests and the token ids of the policy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tether.text.data.prompts import decode
from tether.text.turns.endpoint.protocol import ChatRequest, Completion, TextRequest
from tether.text.turns.template import TurnTemplate
from tether.text.turns.tools.call_formats import Call, CallFormat, openai_call
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ID_LENGTH = 9
"""Length of a tool call's id, of letters and digits; Mistral's templates accept no other length."""


class Chat:
    """The chat template of a policy, and the format of its tool calls.

    Args:
        tokenizer: tokenizer of the policy.
        stop_token_ids: tokens that end sampling.
        call_format: format of its tool calls.
        chat_template: a Jinja template that replaces the tokenizer's.
        template_kwargs: further variables of the template.

    Raises:
        ValueError: the template ends a turn with a token that does not end sampling.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: frozenset[int],
        call_format: CallFormat,
        chat_template: str | None,
        template_kwargs: Mapping[str, object],
    ) -> None:
        @lru_cache(maxsize=64)
        def template(tools: str) -> TurnTemplate:
            listed = {"tools": json.loads(tools) or None}
            return TurnTemplate(tokenizer, stop_token_ids, chat_template, {**template_kwargs, **listed})

        self._tokenizer, self._template, self._format = tokenizer, template, call_format
        self.turn_end = template("[]").turn_end("user")
        """The token with which the template ends a turn."""
        self.vocabulary = len(tokenizer)
        """Number of token ids."""

    def prompt(self, tools: Sequence[JsonObject], messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation and of the opening of the policy's turn.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._template(json.dumps(tools)).prompt(messages)

    def replies(
        self, tools: Sequence[JsonObject], before: Sequence[Message], turn: Message, added: Sequence[Message]
    ) -> list[int]:
        """Return the ids from the end of a turn of the policy to the start of its next one.

        Args:
            tools: the tools that the template lists.
            before: the messages before the turn.
            turn: the turn.
            added: the messages after it.

        Raises:
            ValueError: the template refuses the messages.
        """
        calls = turn.get("tool_calls", ()) if self._format.is_read_back else ()
        return self._template(json.dumps(tools)).replies(before, [added], [calls])

    def tokenize(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of plain text; if it `begins` a sequence, after the tokens that the tokenizer adds in
        front."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=begins)["input_ids"]
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return decode(self._tokenizer, token_ids)

    def answer(
        self, request: ChatRequest | TextRequest, read: Sequence[int], sampled: Sequence[int], *, ended: bool
    ) -> Completion:
        """Return the response to a request.

        Args:
            request: the request.
            read: all ids that the policy read.
            sampled: the ids that it sampled.
            ended: whether the last of these ended the turn.
        """
        text, reason = self.text(sampled[:-1] if ended else sampled), "stop" if ended else "length"
        calls: tuple[JsonObject, ...] = ()
        if isinstance(request, ChatRequest) and request.tools and ended:
            found = self._format.find(text, request.tools)
            if found and not any(call.problem for call in found):  # a program gets broken calls as text
                text, reason = self._format.before_calls(text), "tool_calls"
                calls = tuple(_answered(call, index, [*read, *sampled]) for index, call in enumerate(found))
        return Completion(text, reason, len(read), len(sampled), calls)


def _answered(call: Call, index: int, token_ids: Sequence[int]) -> JsonObject:
    """Return a call for the program, with the arguments as JSON."""
    digest = hashlib.blake2b(np.array([*token_ids, index], dtype=np.int32).tobytes()).hexdigest()
    answered = openai_call(call, digest[:ID_LENGTH])
    # The policy may sample the escape of half a surrogate pair, which cannot be sent.
    function = json.loads(json.dumps(answered["function"], ensure_ascii=False).encode("utf-8", "replace"))
    answered["function"] = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return answered
