"""Replies to the policy between its turns: by tools that it calls, or by an environment that replies to every turn.

A row continues as long as it gets replies::

    policy: <tool_call>...</tool_call>   -> the tools reply
    policy: anything else                -> the row's environment replies, until it reports that it is done;
                                            without an environment the conversation is over

Errors of a tool are replies to the policy. Errors of an environment leave the row without a score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tether.batch import Prompt, RolloutBatch
from tether.runtime.worker_pool import WorkersFailed
from tether.text.data.prompts import decode, tokenize
from tether.text.data.rows import RowAgent, agent_of
from tether.text.rewards.outcome import RewardError, RewardFailure, RewardOutcome, Score
from tether.text.turns.template import TurnTemplate
from tether.text.turns.tools import Call, CallFormat, CallRequest, Reply, StepRequest, ToolPool, openai_call, shortened
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_A_TOKEN = 32
"""Upper bound of the average number of characters per token in any text."""


@dataclass(frozen=True)
class TurnLimits:
    """Limits on conversations; None: no limit."""

    max_assistant_turns: int | None = None
    """Maximum number of turns of the policy; the last one gets no reply."""
    max_user_turns: int | None = None
    """Maximum number of replies."""
    max_parallel_calls: int = 1
    """Maximum number of calls per turn that are executed; the others get an error as reply."""
    max_tool_response_length: int = 256
    """Maximum number of characters of a tool's reply."""
    tool_response_truncate_side: str = "middle"
    """The side of longer replies that is kept, as in `tether.text.turns.tools.shortened`."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """What all conversations of a run share."""

    pool: ToolPool
    tokenizer: PreTrainedTokenizerBase
    template: TurnTemplate
    """Template for rows without tools."""
    tool_template: TurnTemplate
    """Template for rows with tools; the prompt may list these."""
    turn_end: int
    """The token with which the template ends a turn; after a turn with another end the conversation is over."""
    limits: TurnLimits
    call_format: CallFormat
    """Format of the policy's tool calls."""
    default_agent: str
    """Agent of rows that do not name one."""
    environments_score_alone: bool
    """Whether reward functions do not score rows with an environment."""
    _indices: Iterable[int] = field(default_factory=count, repr=False)

    def begin(self, prompts: Sequence[Prompt], n: int) -> ConversationBatch:
        """Return the responder of one rollout with `n` responses to each prompt."""
        return ConversationBatch(self, [prompt for prompt in prompts for _ in range(n)], next(iter(self._indices)))


@dataclass
class _Row:
    """The state of one conversation."""

    prompt: Prompt
    agent: RowAgent
    turns: list[str] = field(default_factory=list)
    """Turns of the policy, as text."""
    turn_ends: list[int] = field(default_factory=list)
    """Index of the last token of each turn in the response."""
    tool_calls: list[list[JsonObject]] = field(default_factory=list)
    """The calls of each turn that the chat template needs."""
    replies: list[list[Message]] = field(default_factory=list)
    """Messages after each turn, as far as the policy has read them."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of the replies' tokens in the response."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Turn -> reward from tools and environment."""
    length: int = 0
    pending: list[int | Reply] | None = None
    """Requests for the replies to the last turn; None: there is no reply."""
    by_tools: bool = False
    calls: int = 0
    failed_calls: int = 0
    cut_by: str = ""
    error: str = ""

    def messages(self) -> list[list[Message]]:
        """Return the messages since the prompt: each turn of the policy, preceded by the replies to the previous
        turn."""
        before = [[], *self.replies]
        return [[*before[at], {"role": "assistant", "content": turn}] for at, turn in enumerate(self.turns)]


class ConversationBatch:
    """The conversations of one rollout, as the `tether.text.sampling.protocol.Responder` of an engine."""

    def __init__(self, shared: Conversations, prompts: Sequence[Prompt], index: int) -> None:
        self._shared, self._index = shared, index
        self._rows = [
            _Row(prompt, agent_of(prompt.agent_name or shared.default_agent, prompt.extra_info)) for prompt in prompts
        ]

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        conversation = self._rows[row]
        conversation.length += len(token_ids)
        conversation.turn_ends.append(conversation.length - 1)
        conversation.turns.append(decode(self._shared.tokenizer, token_ids[:-1]))
        is_regular_end = token_ids[-1] == self._shared.turn_end
        conversation.pending = self._request_replies(row, conversation) if is_regular_end else None

    def wait_reply(self, row: int, room: int) -> list[int] | None:
        """Wait for the reply, as `Responder.wait_reply` describes.

        Raises:
            RewardFailure: processes of tools can no longer be started.
        """
        conversation = self._rows[row]
        if conversation.pending is None:
            return None
        try:
            replies = [
                self._shared.pool.take(request) if isinstance(request, int) else request
                for request in conversation.pending
            ]
        except WorkersFailed as error:
            raise RewardFailure(str(error)) from error
        if conversation.by_tools:
            messages: list[Message] | None = self._tool_messages(conversation, replies)
        else:
            messages = self._environment_messages(conversation, replies[0])
        if messages is None or self._check_limits(conversation):
            return None
        return self._tokenized(conversation, messages, room)

    def _request_replies(self, row: int, conversation: _Row) -> list[int | Reply] | None:
        """Request the replies to the last turn."""
        shared, has_tools = self._shared, conversation.agent.has_tools
        calls = shared.call_format.find(conversation.turns[-1], shared.pool.schemas) if has_tools else []
        conversation.by_tools = bool(calls)
        named = calls if shared.call_format.is_read_back else []
        conversation.tool_calls.append([openai_call(call, f"call_{index}") for index, call in enumerate(named)])
        if calls:
            if self._check_limits(conversation):
                return None
            return [self._call(conversation, call, index) for index, call in enumerate(calls)]
        if conversation.agent.environment is None:
            return None
        prompt = conversation.prompt
        row_info = {
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        messages = conversation.messages()
        request = StepRequest(conversation.agent.environment, self._index, row, row_info, prompt.messages, messages)
        return [self._shared.pool.ask(request, row)]

    def _call(self, conversation: _Row, call: Call, index: int) -> int | Reply:
        conversation.calls += 1
        names = [schema["function"]["name"] for schema in self._shared.pool.schemas]
        limit = self._shared.limits.max_parallel_calls
        if index >= limit:
            return Reply(error=f"it was not run: only the first {limit} of a turn are")
        if call.problem:
            return Reply(error=call.problem)
        if call.name not in names:
            return Reply(error=f"there is no tool {call.name[:80]}, only {', '.join(names) or 'none at all'}")
        kwargs = (conversation.prompt.extra_info.get("tools_kwargs") or {}).get(call.name) or {}
        return self._shared.pool.ask(CallRequest(call.name, call.arguments, dict(kwargs)))

    def _check_limits(self, conversation: _Row) -> bool:
        """Return whether a limit allows no further turn, and record it."""
        limits = self._shared.limits
        max_turns, max_replies = limits.max_assistant_turns, limits.max_user_turns
        if (max_turns and len(conversation.turns) >= max_turns) or (
            max_replies and len(conversation.replies) >= max_replies
        ):
            conversation.cut_by = "turns"
        return bool(conversation.cut_by)

    def _tool_messages(self, conversation: _Row, replies: Sequence[Reply]) -> list[Message]:
        limits = self._shared.limits
        messages: list[Message] = []
        for reply in replies:
            conversation.failed_calls += bool(reply.error)
            text = f"Error: {reply.error}" if reply.error else reply.messages[0]["content"]
            cut = shortened(text, limits.max_tool_response_length, limits.tool_response_truncate_side)
            messages.append({"role": "tool", "content": cut})
            self._add_reward(conversation, reply.reward)
        for index, call in enumerate(conversation.tool_calls[-1]):
            messages[index] = {**messages[index], "tool_call_id": call["id"], "name": call["function"]["name"]}
        return messages

    def _environment_messages(self, conversation: _Row, reply: Reply) -> list[Message] | None:
        if reply.error:
            conversation.error = f"the environment failed: {reply.error}"
            return None
        self._add_reward(conversation, reply.reward)
        return None if reply.done else list(reply.messages)

    def _add_reward(self, conversation: _Row, reward: float) -> None:
        turn = len(conversation.turns) - 1
        conversation.rewards[turn] = conversation.rewards.get(turn, 0.0) + reward

    def _tokenized(self, conversation: _Row, messages: list[Message], room: int) -> list[int] | None:
        """Return the token ids of the replies, and of the opening of the policy's next turn."""
        # A tool may split a surrogate pair when it truncates text, and no tokenizer accepts half of one.
        messages = [{**m, "content": m["content"].encode("utf-8", "replace").decode()} for m in messages]
        if self._is_surely_longer(messages, room):
            conversation.cut_by = "length"
            return None
        template = self._shared.tool_template if conversation.agent.has_tools else self._shared.template
        try:
            turns = [*conversation.replies, messages]
            ids = template.replies(conversation.prompt.messages, turns, conversation.tool_calls)
        except ValueError as error:
            conversation.error = str(error)
            return None
        if len(ids) > room:
            conversation.cut_by = "length"
            return None
        conversation.replies.append(messages)
        conversation.spans.append((conversation.length, conversation.length + len(ids)))
        conversation.length += len(ids)
        return ids

    def _is_surely_longer(self, messages: Sequence[Message], room: int) -> bool:
        """Whether the beginning of very long replies already exceeds the room; tokenizing all of them would take
        minutes."""
        enough = CHARACTERS_A_TOKEN * (room + 1)
        text = "".join(message["content"].strip() for message in messages)
        return len(text) > enough and len(tokenize([text[:enough]], self._shared.tokenizer)[0]) > room

    def solution(self, row: int, token_ids: Sequence[int]) -> str:
        """Return the policy's own text in a finished response, one turn per line."""
        conversation, turns, begin = self._rows[row], list[str](), 0
        for start, stop in [*conversation.spans, (len(token_ids), len(token_ids))]:
            turns.append(decode(self._shared.tokenizer, token_ids[begin:start], skip_special_tokens=True))
            begin = stop
        return "\n".join(turns)

    def extra_info(self, row: int) -> dict[str, Any]:
        """Return the row's `extra_info` with the entries of the conversation."""
        conversation = self._rows[row]
        messages = [dict(message) for turn in conversation.messages() for message in turn]
        return {**conversation.prompt.extra_info, "num_turns": len(conversation.turns), "conversation": messages}

    def needs_reward(self, row: int) -> bool:
        """Return whether the reward function scores a row."""
        conversation = self._rows[row]
        is_scored_alone = self._shared.environments_score_alone and conversation.agent.environment is not None
        return not conversation.error and not is_scored_alone

    def outcome(self, row: int) -> RewardOutcome:
        """Return the outcome of a row that the reward function does not score: an error, or 0 in addition to its
        turns."""
        error = self._rows[row].error
        return RewardError(error) if error else Score(0.0)

    def reward(self, row: int) -> float:
        """Return the sum of the rewards from tools and environment."""
        return sum(self._rows[row].rewards.values())

    def counts(self, row: int) -> dict[str, float]:
        """Return counts of a conversation, for metrics."""
        conversation = self._rows[row]
        return {
            "turns": float(len(conversation.replies) + 1),
            "tool_calls": float(conversation.calls),
            "failed_tool_calls": float(conversation.failed_calls),
            "cut_by_turn_limit": float(conversation.cut_by == "turns"),
            "cut_by_length_limit": float(conversation.cut_by == "length"),
        }

    def complete(self, rollout: RolloutBatch, scores: Sequence[float]) -> None:
        """Set the truncated rows and the scores of the turns in a finished rollout.

        Args:
            rollout: the rollout with this responder.
            scores: score of the reward function for each row, which is assigned to the row's last token.
        """
        placed = torch.zeros(rollout.response_mask.shape, dtype=torch.float32)
        last = torch.where(rollout.response_mask, torch.arange(placed.shape[1]), -1).amax(dim=-1)
        for row, conversation in enumerate(self._rows):
            placed[row, last[row]] += scores[row]
            for turn, reward in conversation.rewards.items():
                placed[row, conversation.turn_ends[turn]] += reward
        rollout.turn_scores = placed
        rollout.truncated = rollout.truncated | self._cut()

    def _cut(self) -> Tensor:
        return torch.tensor([bool(conversation.cut_by) for conversation in self._rows])
