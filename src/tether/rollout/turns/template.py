"""The tokens between two turns of the policy, exactly as the chat template writes it.

Sampled ids stay as they are: only the text of others is tokenized, and a control token in it is text. A context is thus
put together from parts::

    prompt ids | sampled ids, up to the end of the turn | ids of the replies, and the opening of the next turn | ...

which is what the template gives for the whole conversation, if it writes each message the same whatever follows.
`TurnTemplate.check` finds out before a run begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tether.data.chat import decode, tokenize, write_conversation
from tether.data.control_tokens import ControlTokens
from tether.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_KEY = "actor_rollout_ref.rollout.multi_turn"
_THOUGHT = "<think>\nIt is two more.\n</think>\n\n"


class TurnTemplate:
    """A chat template, read turn by turn.

    Args:
        tokenizer: of the policy.
        ends: tokens that end what the policy samples.
        chat_template: a Jinja template instead of the tokenizer's.
        template_kwargs: further variables of the template, tools among them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: frozenset[int],
        chat_template: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._control = ControlTokens(tokenizer, chat_template)
        self._chat_template = chat_template
        self._arguments = {"chat_template": chat_template, **(template_kwargs or {})}

    def replies(self, prompt: Sequence[Message], turns: Sequence[Sequence[Message]]) -> list[int]:
        """Ids from after the end of the policy's last turn up to where it goes on.

        Args:
            prompt: messages before the first response.
            turns: the replies to each turn of the policy; those to the last one are written.

        Raises:
            ValueError: the template refuses them.
        """
        return self._after(prompt, turns)[1:]

    def turn_end(self, role: str) -> int:
        """The token by which the template ends a turn that `role` answers.

        Raises:
            ValueError: it is none that ends what the policy samples.
        """
        first, *_ = self._after([_user("?")], [[{"role": role, "content": "7"}]])
        if first not in self._ends:
            ends = ", ".join(repr(decode(self._tokenizer, [end])) for end in sorted(self._ends)) or "no token"
            raise ValueError(
                f"{_KEY}: the chat template ends a turn with {decode(self._tokenizer, [first])!r}, but the model ends "
                f"what it writes with {ends}, so no turn would end as the template has it. Correct eos_token_id in the "
                "model's generation_config.json, or the template (data.chat_template)"
            )
        return first

    def check(self, roles: Iterable[str], mode: str) -> None:
        """Make sure that the parts, put together, are what the template gives for the whole conversation.

        Args:
            roles: who answers the policy.
            mode: `strict`; `ignore_strippable` lets white space differ; `disable` compares nothing.

        Raises:
            ValueError: the first difference, or a role that the template refuses.
        """
        for role in roles:
            self.turn_end(role)
            if mode == "disable":
                continue
            for said in self._probes():
                if problem := self._difference(role, said, loosely=mode == "ignore_strippable"):
                    raise ValueError(
                        f"{_KEY}.tokenization_sanity_check_mode={mode}: with this chat template, turns put together "
                        f"are not what it gives for the whole conversation: {problem}. Take another template "
                        "(data.chat_template), or train on what the policy really read and wrote with "
                        f"{_KEY}.tokenization_sanity_check_mode=disable"
                    )

    def _probes(self) -> Iterator[str]:
        yield "Let me see."
        if "</think>" in (self._chat_template or str(self._tokenizer.chat_template)):
            yield _THOUGHT + "Let me see."

    def _difference(self, role: str, said: str, *, loosely: bool) -> str:
        """Deviations of the template in two turns of the policy that `role` answers; empty if there are none."""
        prompt: list[Message] = [_user("What is 5 + 7?")]
        conversation, turns = [*prompt], list[list[Message]]()
        context = self._ids(prompt)
        for reply in ("7", "12, as I said."):
            turns.append([{"role": role, "content": reply}])
            conversation += [{"role": "assistant", "content": said}, *turns[-1]]
            whole, tail = self._ids(conversation), self.replies(prompt, turns)
            if problem := self._misfit(whole, context, said, tail, loosely=loosely):
                return f"{problem} (answered by the role {role})"
            context = whole
        return ""

    def _misfit(self, whole: list[int], context: list[int], said: str, tail: list[int], *, loosely: bool) -> str:
        end = len(whole) - len(tail)
        if loosely:
            parts = self._text(context) + said + self._text([*whole[end - 1 : end], *tail])
            same = "".join(self._text(whole).split()) == "".join(parts.split())
            return "" if same else "they differ in more than white space"
        if whole[: len(context)] != context:
            here = next(i for i, (a, b) in enumerate(zip(whole, [*context, -1], strict=False)) if a != b)
            was, now = (self._text(ids[here : here + 8]) for ids in (context, whole))
            return f"what stood there as {was!r} it writes as {now!r} once more follows"
        if whole[end:] != tail:
            return f"it ends with {self._text(whole[end:])!r}, not {self._text(tail)!r}"
        wrote, expected = self._text(whole[len(context) : end - 1]), said
        if wrote.strip() != expected.strip() or whole[end - 1] not in self._ends:
            return f"{said!r} it writes as {self._text(whole[len(context) : end])!r}"
        return ""

    def _after(self, prompt: Sequence[Message], turns: Sequence[Sequence[Message]]) -> list[int]:
        """Ids of what the template writes after the words of the policy's last turn."""
        *before, replies = turns
        broken_by = ""
        if self._control.inside(replies):
            replies, broken_by = self._control.broken(replies)
        turns, mark = [*before, replies], "TURN"
        template = self._chat_template or str(self._tokenizer.chat_template)
        texts = [template, *(str(message.get("content")) for part in (prompt, *turns) for message in part)]
        while any(mark in text for text in texts):
            mark += "N"
        conversation = list(prompt) or [_user("?")]
        for answers in turns:
            conversation += [{"role": "assistant", "content": mark}, *answers]
        _, found, after = self._write(conversation).rpartition(mark)
        if not found:
            raise ValueError(f"{_KEY}: the chat template leaves out what the assistant says (data.chat_template)")
        by_text = (
            self._control.tokenize_broken(after, broken_by) if broken_by else tokenize([after], self._tokenizer)[0]
        )
        ids: list[int] = by_text.tolist()
        return ids

    def _write(self, conversation: Sequence[Message]) -> str:
        try:
            return write_conversation(conversation, self._tokenizer, add_generation_prompt=True, **self._arguments)
        except ValueError as error:
            raise ValueError(f"{_KEY}: {error}. Take another template (data.chat_template)") from error

    def _ids(self, conversation: Sequence[Message]) -> list[int]:
        ids: list[int] = tokenize([self._write(conversation)], self._tokenizer)[0].tolist()
        return ids

    def _text(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
