"""Environments of the library `verifiers` before version 0.4, stepped turn by turn.

The library drives a conversation itself and requests each turn of the model from a client. Here the client is the
policy: the library's loop runs until it requests a turn, and continues once the policy has sampled it. So replies
between turns, the end of a conversation and scores are computed by the environment's own code, including overrides.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

import verifiers
from verifiers.clients import Client
from verifiers.types import (
    MessageContent,
    Messages,
    Response,
    ResponseMessage,
    RewardFunc,
    State,
    Tool,
    ToolCall,
)

from tether.integrations.agents.environment_rows import option_value
from tether.text.turns.tools.call_formats import FORMATS, CallFormat
from tether.text.turns.tools.spec import LIBRARY
from tether.types import JsonObject, Message

_LOOP = asyncio.new_event_loop()  # shared by all conversations, because each loop keeps three files open
_MODEL_NAME = "the policy"  # some environments require the name of the model


class VerifiersConversation:
    """A conversation with an environment; its reward is the rubric's score at the end.

    Args:
        environment: ``NAME?argument=value&...``.
        call_format: format of the policy's tool calls, a key of `tether.text.turns.tools.FORMATS`.
    """

    @classmethod
    def prepare(cls, environment: str, call_format: str) -> None:
        """Load the environment, once per process.

        Raises:
            ValueError: the environment is not installed, or rejects its arguments.
        """
        load(environment)

    def __init__(self, environment: str, call_format: str) -> None:
        self._task: asyncio.Task[State] | None = None
        self._environment, self._format = load(environment), FORMATS[call_format]
        self._client = _Policy()

    def __del__(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def reset(self, messages: list[Message], row: JsonObject) -> None:
        """Begin the conversation: the environment runs until it requests the first turn.

        Raises:
            ValueError: the environment's first request differs from the row's prompt.
        """
        extra = row.get("extra_info") or {}
        columns = extra.get("verifiers", {}).get("row") or {"answer": row.get("ground_truth"), "info": dict(extra)}
        self._task = _LOOP.create_task(self._converse({"example_id": 0, **columns, "prompt": messages}))
        added = self._added(messages)
        if added is None:
            raise ValueError(f"the environment ends before the first turn ({self._ended()['stop_condition']})")
        if added:
            raise ValueError(f"the environment begins with what its dataset does not have: {added[0]!r:.200}")

    def step(self, messages: list[Message]) -> tuple[list[dict[str, str]], float, bool]:
        """Submit the last message as the policy's turn.

        Returns:
            The environment's reply, the reward of the rubric, and whether the conversation is over.

        Raises:
            ValueError: the environment changed earlier messages.
            RuntimeError: the environment or a function of its rubric failed.
        """
        self._client.turns.put_nowait(_response(messages[-1]["content"], self._format))
        added = self._added(messages)
        if added is not None:
            return added, 0.0, False
        return [], float(self._ended()["reward"]), True

    def _ended(self) -> State:
        """Return the state at the end of the conversation."""
        assert self._task is not None
        state = self._task.result()
        if state["error"] is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        return state

    async def _converse(self, row: JsonObject) -> State:
        environment = self._environment
        state = await environment.rollout(row, self._client, _MODEL_NAME, {})
        if state.get("error") is None:
            await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        return state

    def _added(self, messages: Sequence[Message]) -> list[dict[str, str]] | None:
        """Run the environment until it requests a turn; return the messages that it added, or None if it ended."""
        requested = _LOOP.run_until_complete(self._next_prompt())
        if requested is None:
            return None
        if len(requested) < len(messages):
            num_missing = len(messages) - len(requested)
            raise ValueError(f"the environment left out {num_missing} earlier messages of the conversation")
        prompt = [{"role": message.role, "content": _text(message.content)} for message in requested]
        for before, now in zip(messages, prompt, strict=False):
            # The library stores the calls of an assistant's turn separately from its content.
            if before["role"] != now["role"] or (now["role"] != "assistant" and before["content"] != now["content"]):
                raise ValueError(f"the environment changed an earlier message: {before!r:.200} became {now!r:.200}")
        return prompt[len(messages) :]

    async def _next_prompt(self) -> Messages | None:
        assert self._task is not None
        prompt = asyncio.ensure_future(self._client.prompts.get())
        await asyncio.wait({prompt, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if prompt.done():
            return prompt.result()
        prompt.cancel()
        return None


class _Policy(Client):
    """A client that answers with the turns in its queue."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: asyncio.Queue[Messages] = asyncio.Queue()
        self.turns: asyncio.Queue[Response] = asyncio.Queue()

    def setup_client(self, config: object) -> None:
        pass

    async def to_native_tool(self, tool: Tool) -> Tool:
        return tool  # unused: the chat template lists the tools

    async def to_native_prompt(self, messages: Messages) -> tuple[Messages, JsonObject]:
        return messages, {}

    async def get_native_response(self, prompt: Messages, *args: object, **kwargs: object) -> Response:
        self.prompts.put_nowait(prompt)
        return await self.turns.get()

    async def raise_from_native_response(self, response: Response) -> None:
        pass

    async def from_native_response(self, response: Response) -> Response:
        return response

    async def close(self) -> None:
        pass


def _response(turn: str, call_format: CallFormat) -> Response:
    """Convert a turn of the policy, with its tool calls, to the library's type."""
    calls = [
        # A call that cannot be parsed is passed on, so that the environment can reply with an error.
        ToolCall(id=call.id or f"call_{index}", name=call.name or "unreadable", arguments=json.dumps(call.arguments))
        for index, call in enumerate(call_format.find(turn, ()))
    ]
    content = call_format.before_calls(turn) if calls else turn
    message = ResponseMessage(
        content=content, tool_calls=calls or None, finish_reason="tool_calls" if calls else "stop", is_truncated=False
    )
    return Response(id="turn", created=int(time.time()), model=_MODEL_NAME, message=message)


def _text(content: MessageContent | None) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    blocks = [block if isinstance(block, Mapping) else block.model_dump() for block in content]
    if any(block.get("type") != "text" for block in blocks):
        raise ValueError("the environment shows images or audio, but the policy reads only text")
    return "".join(block["text"] for block in blocks)


@functools.cache
def load(spec: str) -> verifiers.Environment:
    """Load the environment of ``NAME?argument=value&...``.

    Raises:
        ValueError: the environment is not installed, rejects its arguments, or scores several responses together.
    """
    name, _, query = spec.partition("?")
    arguments = {key: option_value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    logging.getLogger("verifiers").setLevel(logging.CRITICAL)
    try:
        environment = verifiers.load_environment(name, **arguments)
    except Exception as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name == name.replace("-", "_").split("/")[-1]:
            raise ValueError(
                f"{LIBRARY}{spec}: the environment {name} is not installed. It is a Python package: "
                f"pip install {name.split('/')[-1]}, or prime env install OWNER/{name.split('/')[-1]}"
            ) from error
        raise ValueError(f"{LIBRARY}{spec}: the environment cannot be loaded: {missing or error!r}") from error
    if environment.rubric.has_group_rewards:
        raise ValueError(
            f"{LIBRARY}{spec}: its rubric scores all responses to a prompt together, but tether scores each separately"
        )
    for rubric in _rubrics(environment.rubric):
        rubric.funcs = [_strict(function) for function in rubric.funcs]
    return environment


def tools_of(environment: verifiers.Environment) -> list[JsonObject]:
    """Return the schemas of an environment's tools in the layout of chat templates."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in environment.tool_defs or ()
    ]


def _rubrics(rubric: verifiers.Rubric) -> list[verifiers.Rubric]:
    group = getattr(rubric, "rubrics", None)
    return [rubric] if group is None else [leaf for member in group for leaf in _rubrics(member)]


class _RewardFailed(BaseException):
    """A reward function failed. It is not an `Exception`, for which the library would score the response 0."""


def _strict(function: RewardFunc) -> RewardFunc:
    """Wrap a function of a rubric so that a row whose scoring fails ends without a score, instead of with 0."""

    @functools.wraps(function)
    async def strict(*args: object, **kwargs: object) -> float:
        try:
            score = function(*args, **kwargs)
            return await score if asyncio.iscoroutine(score) else score
        except Exception as error:
            raise _RewardFailed(f"{getattr(function, '__name__', 'a function')} of the rubric: {error!r}") from error

    return strict
