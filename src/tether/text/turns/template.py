"""Tokenizes the text between two turns of the policy, exactly as the chat template writes it.

Sampled ids stay unchanged: only text that the policy did not sample is tokenized, with control tokens in it as plain
text. A context thus consists of segments::

    prompt ids | sampled ids, up to the end of the turn | ids of the replies, and the opening of the next turn | ...

These equal the template's output for the full conversation, if the template writes each message independently of later
ones. `TurnTemplate.check` verifies this before a run begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING

from tether.text.data.prompts import ControlTokens, decode, tokenize, write_conversation
from tether.text.turns.tools import Call, CallFormat, openai_call
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_KEY = "actor_rollout_ref.rollout.multi_turn"
_THOUGHT = "<think>\nIt is two more.\n</think>\n\n"


class TurnTemplate:
    """A chat template, applied turn by turn.

    Args:
        tokenizer: tokenizer of the policy.
        stop_token_ids: tokens that end sampling.
        chat_template: a Jinja template that replaces the tokenizer's.
        template_kwargs: further variables of the template, such as tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: frozenset[int],
        chat_template: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self._tokenizer, self._stop_token_ids = tokenizer, stop_token_ids
        self._control = ControlTokens(tokenizer, chat_template)
        self._chat_template = chat_template
        self._arguments = {"chat_template": chat_template, **(template_kwargs or {})}

    def replies(
        self, prompt: Sequence[Message], turns: Sequence[Sequence[Message]], calls: Sequence[Sequence[JsonObject]] = ()
    ) -> list[int]:
        """Return the ids from the end of the policy's last turn to the start of its next one.

        Args:
            prompt: messages before the first response.
            turns: the replies to each turn of the policy; the ids of the last ones are returned.
            calls: for each turn, the calls that the template needs, in the format of OpenAI's API.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._after(prompt, turns, calls)[1:]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation and of the opening of the policy's turn.

        Control tokens in messages are text, except in those of the assistant.

        Raises:
            ValueError: the template refuses the messages.
        """
        if not self._control.find_in([message for message in messages if message["role"] != "assistant"]):
            return self._ids(messages)
        marked, mark = self._control.insert_marks(messages)
        pairs = zip(messages, marked, strict=True)
        text = self._write([old if old["role"] == "assistant" else new for old, new in pairs])
        ids: list[int] = self._control.tokenize_marked(text, mark).tolist()
        return ids

    def turn_end(self, role: str, calls: Sequence[JsonObject] = ()) -> int:
        """Return the token with which the template ends a turn to which `role` replies.

        Args:
            role: the role.
            calls: the calls of the turn, if the template needs them.

        Raises:
            ValueError: the token does not end sampling.
        """
        first, *_ = self._after([_user("?")], [[_reply(role, "7", calls)]], [calls])
        if first not in self._stop_token_ids:
            stops = (
                ", ".join(repr(decode(self._tokenizer, [end])) for end in sorted(self._stop_token_ids)) or "no token"
            )
            raise ValueError(
                f"{_KEY}: the chat template ends a turn with {decode(self._tokenizer, [first])!r}, but the model ends "
                f"sampling with {stops}, so no turn would end as in the template. Correct eos_token_id in the "
                "model's generation_config.json, or the template (data.chat_template)"
            )
        return first

    def check(self, roles: Iterable[str], mode: str) -> None:
        """Check that the concatenated segments equal the template's output for the full conversation.

        Args:
            roles: roles that reply to the policy.
            mode: `strict`; `ignore_strippable` ignores white space; `disable` compares nothing.

        Raises:
            ValueError: they differ, or the template refuses a role.
        """
        for role in roles:
            self.turn_end(role)
            if mode == "disable":
                continue
            for turn in self._probes():
                if problem := self._difference(role, turn, loosely=mode == "ignore_strippable"):
                    raise ValueError(
                        f"{_KEY}.tokenization_sanity_check_mode={mode}: with this chat template, concatenated turns "
                        f"differ from its output for the full conversation: {problem}. Use another template "
                        "(data.chat_template), or train on the tokens that the policy really read and wrote with "
                        f"{_KEY}.tokenization_sanity_check_mode=disable"
                    )

    def check_calls(self, call_format: CallFormat, name: str) -> None:
        """Check that the format parses a call as the template writes it, and that replies to the call follow it.

        Args:
            call_format: the format.
            name: its name, for messages.

        Raises:
            ValueError: it does not, or the template refuses a call that its replies have to name.
        """
        call = Call("look_up", {"word": "seven"}, id="functions.look_up:0")
        calls, prompt = [openai_call(call, "")], [_user("What is seven?")]
        reply = _reply("tool", "7", calls)
        try:
            full = self._ids([*prompt, {"role": "assistant", "content": "", "tool_calls": calls}, reply])
        except ValueError:
            if call_format.is_read_back:
                raise
            return  # the template writes no calls, or takes them from other data
        tail = self.replies(prompt, [[reply]], [calls] if call_format.is_read_back else [])
        pairs = zip(full, self._ids(prompt), strict=False)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # the opening may contain a thought
        wrote = self._text(full[start : len(full) - len(tail) - 1])
        if call.name not in wrote and not call_format.is_read_back:
            return
        read = [replace(one, id=call.id) for one in call_format.find(wrote, ())]
        if read != [call]:
            raise ValueError(
                f"{_KEY}.format={name}: the chat template writes a call as {wrote!r}, which this format does not read. "
                f"Set the format of this model, or let it be with {_KEY}.tokenization_sanity_check_mode=disable"
            )
        if full[len(full) - len(tail) :] != tail:
            raise ValueError(
                f"{_KEY}.format={name}: the chat template answers a call with {self._text(tail)!r}, and with "
                f"{self._text(full[len(full) - len(tail) :])!r} in the full conversation. Use another template "
                "(data.chat_template)"
            )

    def _probes(self) -> Iterator[str]:
        yield "Let me see."
        if "</think>" in (self._chat_template or str(self._tokenizer.chat_template)):
            yield _THOUGHT + "Let me see."

    def _difference(self, role: str, turn: str, *, loosely: bool) -> str:
        """Return the first difference in two turns of the policy to which `role` replies; empty if there is none."""
        prompt: list[Message] = [_user("What is 5 + 7?")]
        conversation, turns = [*prompt], list[list[Message]]()
        context = self._ids(prompt)
        for reply in ("7", "12, as I said."):
            turns.append([{"role": role, "content": reply}])
            conversation += [{"role": "assistant", "content": turn}, *turns[-1]]
            full, tail = self._ids(conversation), self.replies(prompt, turns)
            if problem := self._misfit(full, context, turn, tail, loosely=loosely):
                return f"{problem} (replies by the role {role})"
            context = full
        return ""

    def _misfit(self, full: list[int], context: list[int], turn: str, tail: list[int], *, loosely: bool) -> str:
        end = len(full) - len(tail)
        if loosely:
            concatenated = self._text(context) + turn + self._text([*full[end - 1 : end], *tail])
            same = "".join(self._text(full).split()) == "".join(concatenated.split())
            return "" if same else "they differ in more than white space"
        if full[: len(context)] != context:
            index = next(i for i, (a, b) in enumerate(zip(full, [*context, -1], strict=False)) if a != b)
            was, now = (self._text(ids[index : index + 8]) for ids in (context, full))
            return f"it writes {was!r} as {now!r} when more messages follow"
        if full[end:] != tail:
            return f"it ends with {self._text(full[end:])!r}, not {self._text(tail)!r}"
        wrote, expected = self._text(full[len(context) : end - 1]), turn
        if wrote.strip() != expected.strip() or full[end - 1] not in self._stop_token_ids:
            return f"it writes {turn!r} as {self._text(full[len(context) : end])!r}"
        return ""

    def _after(
        self, prompt: Sequence[Message], turns: Sequence[Sequence[Message]], calls: Sequence[Sequence[JsonObject]] = ()
    ) -> list[int]:
        """Return the ids that the template writes after the text of the policy's last turn."""
        *before, replies = turns
        reply_mark = ""
        if self._control.find_in(replies):
            replies, reply_mark = self._control.insert_marks(replies)
        turns, mark = [*before, replies], "TURN"
        template = self._chat_template or str(self._tokenizer.chat_template)
        texts = [template, *(str(message) for messages in (prompt, *turns) for message in messages)]
        while any(mark in text for text in texts):
            mark += "N"
        conversation = list(prompt) or [_user("?")]
        for replies_to_turn, calls_of_turn in zip_longest(turns, calls, fillvalue=()):
            conversation += [_turn(mark, calls_of_turn), *replies_to_turn]
        _, separator, after = self._write(conversation).rpartition(mark)
        if not separator:
            raise ValueError(f"{_KEY}: the chat template omits the assistant's messages (data.chat_template)")
        by_text = (
            self._control.tokenize_marked(after, reply_mark) if reply_mark else tokenize([after], self._tokenizer)[0]
        )
        ids: list[int] = by_text.tolist()
        if calls and calls[-1]:  # the mark is inside the arguments of the last call, which the template closes
            ids = ids[next((index for index, token in enumerate(ids) if token in self._stop_token_ids), 0) :]
        return ids

    def _write(self, conversation: Sequence[Message]) -> str:
        try:
            return write_conversation(conversation, self._tokenizer, add_generation_prompt=True, **self._arguments)
        except ValueError as error:
            raise ValueError(f"{_KEY}: {error}. Use another template (data.chat_template)") from error

    def _ids(self, conversation: Sequence[Message]) -> list[int]:
        ids: list[int] = tokenize([self._write(conversation)], self._tokenizer)[0].tolist()
        return ids

    def _text(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids)


def _turn(mark: str, calls: Sequence[JsonObject]) -> JsonObject:
    """Return a turn of the policy that contains the mark, in its content or in the arguments of its last call."""
    if not calls:
        return {"role": "assistant", "content": mark}
    *others, last = calls
    marked = {**last, "function": {**last["function"], "arguments": {"mark": mark}}}
    return {"role": "assistant", "content": "", "tool_calls": [*others, marked]}


def _reply(role: str, content: str, calls: Sequence[JsonObject]) -> JsonObject:
    """Return a reply to a turn; if the turn has a call, the reply names it."""
    named = {"tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]} if calls else {}
    return {"role": role, "content": content, **named}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
