"""Environments of the library `verifiers`, stepped turn by turn.

The library drives a conversation itself, and asks a client for each turn of the model. Here the client is the policy:
the library's own loop runs up to where it asks, and goes on once the policy has said its turn. What an environment
does between turns, when it ends, and how its rubric scores is thus its own code, whatever it overrides.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
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

from tether.tools.calls import FORMATS, Call
from tether.tools.spec import LIBRARY
from tether.types import JsonObject, Message

_LOOP = asyncio.new_event_loop()  # of all conversations: each would hold three files open
_RUNNING = "the policy"  # name of the model, which some environments look at


class Rollout:
    """One conversation with an environment; its reward is that of the rubric, at the end.

    Args:
        environment: ``NAME?argument=value&...``.
        call_format: how the policy writes calls of tools, see `tether.tools.FORMATS`.
    """

    @classmethod
    def prepare(cls, environment: str, call_format: str) -> None:
        """Load the environment, once in each process.

        Raises:
            ValueError: it is not installed, or refuses its arguments.
        """
        load(environment)

    def __init__(self, environment: str, call_format: str) -> None:
        self._task: asyncio.Task[State] | None = None
        self._environment, self._find_calls = load(environment), FORMATS[call_format]
        self._client = _Policy()

    def __del__(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def reset(self, messages: list[Message], row: JsonObject) -> None:
        """Begin the conversation: the environment runs up to where it asks for the first turn.

        Raises:
            ValueError: it asks otherwise than the row does.
        """
        extra = row.get("extra_info") or {}
        known = extra.get("verifiers", {}).get("row") or {"answer": row.get("ground_truth"), "info": dict(extra)}
        given = {"example_id": 0, **known, "prompt": messages}
        self._task = _LOOP.create_task(self._converse(given))
        added = self._added(messages)
        if added is None:
            raise ValueError(f"the environment ends before the first turn ({self._ended()['stop_condition']})")
        if added:
            raise ValueError(f"the environment begins with what its dataset does not have: {added[0]!r:.200}")

    def step(self, messages: list[Message]) -> tuple[list[dict[str, str]], float, bool]:
        """Say the last message; what is answered, the reward of the rubric, and whether the conversation is over.

        Raises:
            ValueError: the environment changes what was said before.
            RuntimeError: it failed, or a function of its rubric did.
        """
        self._client.turns.put_nowait(_response(messages[-1]["content"], self._find_calls))
        added = self._added(messages)
        if added is not None:
            return added, 0.0, False
        return [], float(self._ended()["reward"]), True

    def _ended(self) -> State:
        """The state at the end."""
        assert self._task is not None
        state = self._task.result()
        if state["error"] is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        return state

    async def _converse(self, row: JsonObject) -> State:
        environment = self._environment
        state = await environment.rollout(row, self._client, _RUNNING, {})
        if state.get("error") is None:
            await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        return state

    def _added(self, messages: Sequence[Message]) -> list[dict[str, str]] | None:
        """Let the environment go on until it asks for a turn; what it adds to these messages; None: it ended."""
        shown = _LOOP.run_until_complete(self._asked())
        if shown is None:
            return None
        if len(shown) < len(messages):
            raise ValueError(f"the environment leaves out {len(messages) - len(shown)} messages that were said before")
        told = [{"role": message.role, "content": _text(message.content)} for message in shown]
        for before, now in zip(messages, told, strict=False):
            # Of a turn with calls the library keeps the calls apart from the words.
            if before["role"] != now["role"] or (now["role"] != "assistant" and before["content"] != now["content"]):
                raise ValueError(f"the environment changes what was said before: {before!r:.200} to {now!r:.200}")
        return told[len(messages) :]

    async def _asked(self) -> Messages | None:
        assert self._task is not None
        asked = asyncio.ensure_future(self._client.asked.get())
        await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None


class _Policy(Client):
    """A client whose answers are the turns that were put in."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[Messages] = asyncio.Queue()
        self.turns: asyncio.Queue[Response] = asyncio.Queue()

    def setup_client(self, config: object) -> None:
        """See `Client`: there is nothing to set up."""

    async def to_native_tool(self, tool: Tool) -> Tool:
        """See `Client`: the chat template lists tools."""
        return tool

    async def to_native_prompt(self, messages: Messages) -> tuple[Messages, JsonObject]:
        """See `Client`."""
        return messages, {}

    async def get_native_response(self, prompt: Messages, *args: object, **kwargs: object) -> Response:
        """The next turn of the policy."""
        self.asked.put_nowait(prompt)
        return await self.turns.get()

    async def raise_from_native_response(self, response: Response) -> None:
        """See `Client`: a turn is always one."""

    async def from_native_response(self, response: Response) -> Response:
        """See `Client`."""
        return response

    async def close(self) -> None:
        """See `Client`: there is nothing to close."""


def _response(said: str, find_calls: Callable[[str], list[Call]]) -> Response:
    """A turn of the policy as the library has it, with its calls of tools."""
    calls = [
        # What cannot be read reaches the environment as it is; it answers what is wrong.
        ToolCall(id=f"call_{at}", name=call.name or "unreadable", arguments=json.dumps(call.arguments))
        for at, call in enumerate(find_calls(said))
    ]
    thought, mark, spoken = said.rpartition("</think>")  # which may have drafts of calls
    words = (thought + mark + spoken.split("<tool_call>")[0]).rstrip() if calls else said
    message = ResponseMessage(
        content=words, tool_calls=calls or None, finish_reason="tool_calls" if calls else "stop", is_truncated=False
    )
    return Response(id="turn", created=int(time.time()), model=_RUNNING, message=message)


def _text(content: MessageContent | None) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("the environment shows pictures or sounds, and the policy reads text alone")
    return "".join(part["text"] for part in parts)


@functools.cache
def load(spec: str) -> verifiers.Environment:
    """The environment of ``NAME?argument=value&...``.

    Raises:
        ValueError: it is not installed, refuses its arguments, or scores several responses together.
    """
    name, _, query = spec.partition("?")
    arguments = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    logging.getLogger("verifiers").setLevel(logging.CRITICAL)
    try:
        found = verifiers.load_environment(name, **arguments)
    except Exception as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name == name.replace("-", "_").split("/")[-1]:
            raise ValueError(
                f"{LIBRARY}{spec}: the environment {name} is not installed. It is a Python package: "
                f"pip install {name.split('/')[-1]}, or prime env install OWNER/{name.split('/')[-1]}"
            ) from error
        raise ValueError(f"{LIBRARY}{spec}: the environment cannot be loaded: {missing or error!r}") from error
    if found.rubric.has_group_rewards:
        raise ValueError(f"{LIBRARY}{spec}: its rubric scores the responses to a prompt together; tether asks for each")
    for rubric in _rubrics(found.rubric):
        rubric.funcs = [_strict(function) for function in rubric.funcs]
    return found


def tools_of(environment: verifiers.Environment) -> list[JsonObject]:
    """Schemas of an environment's tools, as a chat template takes them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in environment.tool_defs or ()
    ]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _rubrics(rubric: verifiers.Rubric) -> list[verifiers.Rubric]:
    parts = getattr(rubric, "rubrics", None)
    return [rubric] if parts is None else [leaf for part in parts for leaf in _rubrics(part)]


class _RewardFailed(BaseException):
    """Not an `Exception`: the library takes those of a reward function for a score of 0."""


def _strict(function: RewardFunc) -> RewardFunc:
    """The function of a rubric, whose error ends the row without a score instead of scoring 0."""

    @functools.wraps(function)
    async def strict(*args: object, **kwargs: object) -> float:
        try:
            found = function(*args, **kwargs)
            return await found if asyncio.iscoroutine(found) else found
        except Exception as error:
            raise _RewardFailed(f"{getattr(function, '__name__', 'a function')} of the rubric: {error!r}") from error

    return strict
