"""Records the calls of an episode as the token ids that the policy read and sampled.

If the messages of a call begin with those of an earlier call and its response, it continues that call: the ids so far
are the recorded ones, and only the later messages are tokenized. The longest such match is used. Calls thus form trees,
and the paths of these are the branches of the episode::

    call 1   [prompt][sampled]
    call 2   [prompt][sampled][reply][sampled]        continues call 1
    call 3   [prompt][sampled][other][sampled]        also continues call 1: a branch
    call 4   [edited history........][sampled]        continues no call: another tree

Sampled tokens are never tokenized again. In an edited history, the text of an earlier response is read like any other
text, and is not trained on there.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tether.batch import Prompt
from tether.text.turns.endpoint.chat import Chat
from tether.text.turns.endpoint.protocol import CallRefused, ChatRequest, Completion, TextRequest
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from torch import Tensor

CHARACTERS_A_TOKEN = 32
"""Upper bound of the average number of characters per token in any text."""


@dataclass(frozen=True)
class SampledTurn:
    """The turn that the policy sampled for a call."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    """Version of the weights that sampled each token."""
    ended: bool
    """Whether the policy ended the turn by a stop token."""
    truncated: bool = False
    """Whether the turn was truncated by a limit of the run, not by one that the call requested."""
    kept: tuple[Tensor, Tensor] | None = None
    """The row's `count` and `words` of `tether.batch.KeptTokens`."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call with its response."""

    continues: RecordedCall | None
    read: list[int]
    """Ids that the policy read after those of the call that this one continues."""
    turn: SampledTurn
    conversation: tuple[Message, ...]
    """All messages including the response; for a text completion, its prompt and its response."""
    text: str = ""
    """Prompt and response of a text completion whose prompt is text."""

    def path(self) -> list[RecordedCall]:
        """Return the calls of the branch that ends here, in order."""
        calls: list[RecordedCall] = []
        call: RecordedCall | None = self
        while call is not None:
            calls.append(call)
            call = call.continues
        return calls[::-1]

    def token_ids(self) -> list[int]:
        """Return all ids up to the end of the response."""
        return [token for call in self.path() for token in (*call.read, *call.turn.token_ids)]


@dataclass(frozen=True)
class Context:
    """The input of the policy for a call."""

    request: ChatRequest | TextRequest
    continues: RecordedCall | None
    read: list[int]
    token_ids: list[int]
    """All ids: those of the earlier calls, then `read`."""


@dataclass(eq=False)
class AgentEpisode:
    """An episode that a program plays with a row of the data.

    The server's thread counts calls and sets the reward; the sampler's thread does everything else.
    """

    row: int
    """Row of the batch."""
    prompt: Prompt
    sample: int
    """Index of the row in its step, for the noise."""
    max_calls: int
    num_calls: int = 0
    """Number of calls that were accepted."""
    reward: float | None = None
    """The last reward that the program sent."""
    key: str = field(default_factory=secrets.token_urlsafe, repr=False)
    """API key of its program."""
    is_over: bool = False
    cut_by: str = ""
    """The limit that a call exceeded: `calls` or `length`."""
    error: str = ""
    """The reason why the episode has no score."""
    calls: list[RecordedCall] = field(default_factory=list)
    num_undelivered: int = 0
    """Number of calls whose client had closed its connection before their answers were complete."""
    _by_history: dict[bytes, RecordedCall] = field(default_factory=dict, repr=False)
    """Hash of the messages up to and including a response -> its call."""
    _repeats: Counter[bytes] = field(default_factory=Counter, repr=False)

    def count_call(self) -> None:
        """Count a call.

        Raises:
            CallRefused: the episode is over, or has reached its maximum number of calls.
        """
        if self.is_over:
            raise CallRefused("the episode is over", code="episode_over")
        if self.num_calls >= self.max_calls:
            self.cut_by = self.cut_by or "calls"
            raise CallRefused(f"the episode has had its {self.max_calls} calls", code="call_limit_exceeded")
        self.num_calls += 1

    def context(self, request: ChatRequest | TextRequest, chat: Chat, max_length: int) -> Context:
        """Return what the policy reads for a call; it leaves at least one of `max_length` tokens for the response.

        Raises:
            CallRefused: the episode is over, the request is too long, or the chat template refuses its messages.
        """
        if self.is_over:  # its rows are complete
            raise CallRefused("the episode is over", code="episode_over")
        if request.size > CHARACTERS_A_TOKEN * max_length:  # tokenizing it would take long
            raise self._too_long(f"{request.size} characters", max_length)
        try:
            if isinstance(request, ChatRequest):
                continues, read = self._read_chat(request, chat)
            else:
                continues, read = self._read_text(request.prompt, chat)
        except (ValueError, TypeError, RecursionError) as error:
            raise CallRefused(str(error), param="messages") from error
        token_ids = [*(continues.token_ids() if continues else ()), *read]
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < chat.vocabulary:
            what = f"the prompt has no tokens, or others than the {chat.vocabulary} of the policy"
            raise CallRefused(what, code="invalid_value", param="prompt")
        if len(token_ids) >= max_length:
            raise self._too_long(f"{len(token_ids)} tokens", max_length)
        return Context(request, continues, read, token_ids)

    def _too_long(self, size: str, max_length: int) -> CallRefused:
        self.cut_by = self.cut_by or "length"
        # OpenAI's wording, by which clients recognise the error: verifiers then scores the conversation so far.
        limit = f"This model's maximum context length is {max_length} tokens"
        what = f"{limit}, and the request has {size}, which leaves no room for an answer"
        return CallRefused(what, code="context_length_exceeded", param="messages")

    def _read_chat(self, request: ChatRequest, chat: Chat) -> tuple[RecordedCall | None, list[int]]:
        """Return the call that a request continues, and the ids after it."""
        messages = request.messages
        hashes = list(_history(request.tools, messages))
        for length in range(len(messages), 0, -1):
            if call := self._by_history.get(hashes[length]):
                replies = chat.replies(request.tools, messages[: length - 1], messages[length - 1], messages[length:])
                has_end = call.turn.token_ids[-1] == chat.turn_end
                return call, replies if has_end else [chat.turn_end, *replies]
        return None, chat.prompt(request.tools, messages)

    def _read_text(self, prompt: str | tuple[int, ...], chat: Chat) -> tuple[RecordedCall | None, list[int]]:
        """Return the call that a prompt continues, and the ids after it."""
        if isinstance(prompt, str):
            known = {call: len(call.text) for call in self.calls if call.text and prompt.startswith(call.text)}
        else:
            paths = {call: tuple(call.token_ids()) for call in self.calls}
            known = {call: len(ids) for call, ids in paths.items() if prompt[: len(ids)] == ids}
        continues = max(known, key=lambda call: known[call], default=None)
        added = prompt[known[continues] if continues else 0 :]
        return continues, chat.tokenize(added, begins=continues is None) if isinstance(added, str) else list(added)

    def noise(self, context: Context) -> int:
        """Return the noise index of a call. It depends only on what the policy reads, and how often it has read it in
        this episode, so that concurrent sampling does not affect it."""
        ids = np.array(context.token_ids, dtype=np.int32).tobytes()
        self._repeats[ids] += 1
        digest = hashlib.blake2b(ids, digest_size=8)
        digest.update(f"{self.sample} {self._repeats[ids]}".encode())
        return int.from_bytes(digest.digest()) >> 1  # an int64

    def record(self, context: Context, turn: SampledTurn, chat: Chat) -> Completion:
        """Record the response to a call and return it for the program."""
        request = context.request
        answer = chat.answer(request, context.token_ids, turn.token_ids, ended=turn.ended)
        message: JsonObject = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            message["tool_calls"] = list(answer.tool_calls)
        if isinstance(request, ChatRequest):
            conversation = (*request.messages, message)
            call = RecordedCall(context.continues, context.read, turn, conversation)
            *_, history = _history(request.tools, conversation)
            self._by_history[history] = call
        else:
            text = request.prompt + answer.content if isinstance(request.prompt, str) else ""
            conversation = ({"role": "user", "content": chat.text(context.token_ids)}, message)
            call = RecordedCall(context.continues, context.read, turn, conversation, text)
        self.calls.append(call)
        return answer

    def branches(self) -> list[list[RecordedCall]]:
        """Return the calls of each branch, in the order in which the branches ended."""
        continued = {call.continues for call in self.calls}
        return [call.path() for call in self.calls if call not in continued]

    def main_branch(self) -> list[RecordedCall]:
        """Return the branch with the most sampled tokens, the latest one of several; empty without calls."""
        return max(reversed(self.branches()), key=num_sampled, default=[])

    def further_branches(self) -> list[list[RecordedCall]]:
        """Return the branches except the main one, in the order in which they ended."""
        main = self.main_branch()
        return [branch for branch in self.branches() if branch[-1] is not main[-1]]


def num_sampled(calls: Sequence[RecordedCall]) -> int:
    """Return the number of tokens that the policy sampled in these calls."""
    return sum(len(call.turn.token_ids) for call in calls)


@dataclass(frozen=True)
class PendingCall:
    """A call that waits for its answer."""

    episode: AgentEpisode
    request: ChatRequest | TextRequest
    answer: Future[Completion] = field(default_factory=Future)
    disconnected: threading.Event = field(default_factory=threading.Event)
    """Set by the server's thread when the client has closed its connection before the answer."""


def _history(tools: Sequence[JsonObject], messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield the hash of the first 0, 1, 2, ... messages.

    White space around a response is ignored, because libraries strip it before they send the response back.
    """
    state = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode())
    yield state.digest()
    for message in messages:
        content = message["content"].strip() if message["role"] == "assistant" else message["content"]
        calls = [_comparable(call["function"]) for call in message.get("tool_calls", ())]
        state.update(json.dumps([message["role"], content, calls], sort_keys=True).encode())
        yield state.digest()


def _comparable(function: JsonObject) -> list[object]:
    """Return name and arguments of a tool call, independent of the formatting of their JSON."""
    arguments = function.get("arguments")
    try:
        return [function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments]
    except (ValueError, RecursionError):
        return [function["name"], arguments]
