"""Answers a policy between its turns: tools it calls, or an environment that replies to every turn.

A row goes on as long as it is answered::

    policy: <tool_call>...</tool_call>   -> the tools answer
    policy: anything else                -> the row's environment answers, until it says that it is done
                                            without an environment the conversation is over

What a tool does wrong is an answer to the policy. What an environment does wrong leaves the row without a score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tether.batch import Prompt, RolloutBatch
from tether.data.chat import decode
from tether.data.rows import RowAgent, agent_of
from tether.rewards import RewardError, RewardFailure, RewardOutcome, Score
from tether.rollout.turns.template import TurnTemplate
from tether.runtime.worker_pool import WorkersFailed
from tether.tools import Call, CallRequest, Reply, StepRequest, ToolPool, shortened
from tether.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TurnLimits:
    """Where conversations are cut; None: nowhere."""

    max_assistant_turns: int | None = None
    """Turns of the policy; what it says in the last one is not answered."""
    max_user_turns: int | None = None
    """Answers."""
    max_parallel_calls: int = 1
    """Calls in a turn that are run; the others are answered with an error."""
    max_tool_response_length: int = 256
    """Characters of what a tool answers."""
    tool_response_truncate_side: str = "middle"
    """See `tether.tools.shortened`."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Parts that the conversations of a run share."""

    pool: ToolPool
    tokenizer: PreTrainedTokenizerBase
    template: TurnTemplate
    """Of rows without tools."""
    tool_template: TurnTemplate
    """Of rows with tools, which the template may list."""
    turn_end: int
    """The token by which the template ends a turn; a turn that ends otherwise is the last one."""
    limits: TurnLimits
    find_calls: Callable[[str], list[Call]]
    """In a turn of the policy."""
    default_agent: str
    """Of rows that name none."""
    environments_score_alone: bool
    """Rows with an environment are not scored by rules."""
    _number: Iterable[int] = field(default_factory=count, repr=False)

    def begin(self, prompts: Sequence[Prompt], n: int) -> Talk:
        """The partner of one rollout, of `n` responses to each prompt."""
        return Talk(self, [prompt for prompt in prompts for _ in range(n)], next(iter(self._number)))


@dataclass
class _Row:
    """One conversation so far."""

    prompt: Prompt
    agent: RowAgent
    spoken: list[str] = field(default_factory=list)
    """Turns of the policy, as text."""
    ends: list[int] = field(default_factory=list)
    """Where each ended: number of its last token in the response."""
    replies: list[list[Message]] = field(default_factory=list)
    """Messages after each turn, as far as the policy read them."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of the replies' tokens in the response."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Turn -> what tools and environment gave for it."""
    length: int = 0
    pending: list[int | Reply] | None = None
    """Requests that answer the last turn; None: nobody answers."""
    by_tools: bool = False
    calls: int = 0
    failed_calls: int = 0
    cut_by: str = ""
    error: str = ""

    def conversation(self) -> list[list[Message]]:
        """Since the prompt: each turn of the policy, with the replies to the turn before in front of it."""
        before = [[], *self.replies]
        return [[*before[at], {"role": "assistant", "content": said}] for at, said in enumerate(self.spoken)]


class Talk:
    """The conversations of one rollout; see `tether.rollout.Partner`."""

    def __init__(self, common: Conversations, prompts: Sequence[Prompt], number: int) -> None:
        self._common, self._number = common, number
        self._rows = [
            _Row(prompt, agent_of(prompt.agent_name or common.default_agent, prompt.extra_info)) for prompt in prompts
        ]

    def listen(self, row: int, token_ids: list[int]) -> None:
        """See `Partner.listen`."""
        talk = self._rows[row]
        talk.length += len(token_ids)
        talk.ends.append(talk.length - 1)
        talk.spoken.append(decode(self._common.tokenizer, token_ids[:-1]))
        talk.pending = self._ask(row, talk) if token_ids[-1] == self._common.turn_end else None

    def answer(self, row: int, room: int) -> list[int] | None:
        """See `Partner.answer`.

        Raises:
            RewardFailure: processes of tools cannot be started any more.
        """
        talk = self._rows[row]
        if talk.pending is None:
            return None
        try:
            replies = [self._common.pool.take(one) if isinstance(one, int) else one for one in talk.pending]
        except WorkersFailed as error:
            raise RewardFailure(str(error)) from error
        messages = self._by_tools(talk, replies) if talk.by_tools else self._by_environment(talk, replies[0])
        if messages is None or self._is_cut(talk):
            return None
        return self._tokenized(talk, messages, room)

    def _ask(self, row: int, talk: _Row) -> list[int | Reply] | None:
        """Have the last turn answered."""
        calls = self._common.find_calls(talk.spoken[-1]) if talk.agent.has_tools else []
        talk.by_tools = bool(calls)
        if calls:
            return None if self._is_cut(talk) else [self._call(talk, call, at) for at, call in enumerate(calls)]
        if talk.agent.environment is None:
            return None
        prompt = talk.prompt
        about = {
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        spoken = talk.conversation()
        request = StepRequest(talk.agent.environment, self._number, row, about, prompt.messages, spoken)
        return [self._common.pool.ask(request, row)]

    def _call(self, talk: _Row, call: Call, at: int) -> int | Reply:
        talk.calls += 1
        names = [schema["function"]["name"] for schema in self._common.pool.schemas]
        most = self._common.limits.max_parallel_calls
        if at >= most:
            return Reply(error=f"it was not run: only the first {most} of a turn are")
        if call.problem:
            return Reply(error=call.problem)
        if call.name not in names:
            return Reply(error=f"there is no tool {call.name[:80]}, only {', '.join(names) or 'none at all'}")
        kwargs = (talk.prompt.extra_info.get("tools_kwargs") or {}).get(call.name) or {}
        return self._common.pool.ask(CallRequest(call.name, call.arguments, dict(kwargs)))

    def _is_cut(self, talk: _Row) -> bool:
        """Whether the limits leave no further turn, which is remembered."""
        limits = self._common.limits
        most, answers = limits.max_assistant_turns, limits.max_user_turns
        if (most and len(talk.spoken) >= most) or (answers and len(talk.replies) >= answers):
            talk.cut_by = "turns"
        return bool(talk.cut_by)

    def _by_tools(self, talk: _Row, replies: Sequence[Reply]) -> list[Message]:
        limits = self._common.limits
        messages: list[Message] = []
        for reply in replies:
            talk.failed_calls += bool(reply.error)
            text = f"Error: {reply.error}" if reply.error else reply.messages[0]["content"]
            cut = shortened(text, limits.max_tool_response_length, limits.tool_response_truncate_side)
            messages.append({"role": "tool", "content": cut})
            self._reward(talk, reply.reward)
        return messages

    def _by_environment(self, talk: _Row, reply: Reply) -> list[Message] | None:
        if reply.error:
            talk.error = f"the environment failed: {reply.error}"
            return None
        self._reward(talk, reply.reward)
        return None if reply.done else list(reply.messages)

    def _reward(self, talk: _Row, reward: float) -> None:
        turn = len(talk.spoken) - 1
        talk.rewards[turn] = talk.rewards.get(turn, 0.0) + reward

    def _tokenized(self, talk: _Row, messages: list[Message], room: int) -> list[int] | None:
        """Ids of the replies, and of the opening of the policy's next turn."""
        # Half characters, which no tokenizer takes, may come out of a tool that cut its text.
        messages = [{**m, "content": m["content"].encode("utf-8", "replace").decode()} for m in messages]
        template = self._common.tool_template if talk.agent.has_tools else self._common.template
        try:
            ids = template.replies(talk.prompt.messages, [*talk.replies, messages])
        except ValueError as error:
            talk.error = str(error)
            return None
        if len(ids) > room:
            talk.cut_by = "length"
            return None
        talk.replies.append(messages)
        talk.spans.append((talk.length, talk.length + len(ids)))
        talk.length += len(ids)
        return ids

    def solution(self, row: int, token_ids: Sequence[int]) -> str:
        """The policy's own words in a finished response, one turn per line."""
        talk, parts, begin = self._rows[row], list[str](), 0
        for start, stop in [*talk.spans, (len(token_ids), len(token_ids))]:
            parts.append(decode(self._common.tokenizer, token_ids[begin:start], skip_special_tokens=True))
            begin = stop
        return "\n".join(parts)

    def extra_info(self, row: int) -> dict[str, Any]:
        """The conversation's entries in `extra_info`, besides the row's own."""
        talk = self._rows[row]
        messages = [dict(message) for turn in talk.conversation() for message in turn]
        return {**talk.prompt.extra_info, "num_turns": len(talk.spoken), "conversation": messages}

    def asks_reward(self, row: int) -> bool:
        """Whether the reward function scores a row."""
        talk = self._rows[row]
        return not talk.error and not (self._common.environments_score_alone and talk.agent.environment is not None)

    def own_outcome(self, row: int) -> RewardOutcome:
        """The outcome of a row that the reward function does not score: an error, or nothing to add to its turns."""
        error = self._rows[row].error
        return RewardError(error) if error else Score(0.0)

    def reward(self, row: int) -> float:
        """Sum of what tools and environment gave."""
        return sum(self._rows[row].rewards.values())

    def counts(self, row: int) -> dict[str, float]:
        """Numbers of a conversation, for metrics."""
        talk = self._rows[row]
        return {
            "turns": float(len(talk.replies) + 1),
            "tool_calls": float(talk.calls),
            "failed_tool_calls": float(talk.failed_calls),
            "cut_by_turn_limit": float(talk.cut_by == "turns"),
            "cut_by_length_limit": float(talk.cut_by == "length"),
        }

    def complete(self, rollout: RolloutBatch, scores: Sequence[float]) -> None:
        """Put into a finished rollout which rows were cut, and their scores by turns.

        Args:
            rollout: of this partner.
            scores: of the reward function, for each row; they go to the row's last token.
        """
        placed = torch.zeros(rollout.response_mask.shape, dtype=torch.float32)
        last = torch.where(rollout.response_mask, torch.arange(placed.shape[1]), -1).amax(dim=-1)
        for row, talk in enumerate(self._rows):
            placed[row, last[row]] += scores[row]
            for turn, reward in talk.rewards.items():
                placed[row, talk.ends[turn]] += reward
        rollout.turn_scores = placed
        rollout.truncated = rollout.truncated | self._cut()

    def _cut(self) -> Tensor:
        return torch.tensor([bool(talk.cut_by) for talk in self._rows])
