"""OpenAI's requests and responses (https://platform.openai.com/docs/api-reference).

An unsupported request is refused with an error in OpenAI's format. Sampling parameters are those of the run; a request
cannot change them, because the policy learns from its samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tether.types import JsonObject

ROLES = ("system", "developer", "user", "assistant", "tool")
RUN_SETTINGS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"}
)
"""Parameters that have no effect, because the run has its own settings."""
NO_EFFECT = frozenset(
    {"user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key"}
)
"""Parameters that do not concern sampling."""
READ = frozenset(
    {"model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "stop": ([], ""), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "tool_choice": ("auto", "none"),
    "echo": (False,), "suffix": ("",), "functions": ([],),
}  # fmt: skip
"""Values of unsupported parameters that are accepted, because they request nothing beyond what is supported."""


class CallRefused(Exception):
    """A call that gets an error as its response.

    Args:
        message: the reason, for the author of the program.
        status: HTTP status.
        code: OpenAI's code of the error.
        param: the invalid parameter.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> JsonObject:
        """Return the body of the response."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class ChatRequest:
    """A request to /chat/completions."""

    messages: tuple[JsonObject, ...]
    """Messages with text as `content`, and the arguments of tool calls as objects, as chat templates expect them."""
    tools: tuple[JsonObject, ...] = ()
    max_tokens: int | None = None

    @property
    def size(self) -> int:
        """Return the number of characters."""
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class TextRequest:
    """A request to /completions."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None

    @property
    def size(self) -> int:
        """Return the number of characters or token ids."""
        return len(self.prompt)


@dataclass(frozen=True)
class Completion:
    """The policy's response to a call."""

    content: str
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    tool_calls: tuple[JsonObject, ...] = ()
    """Tool calls in OpenAI's format."""


def parse_json(body: bytes) -> JsonObject:
    """Return the JSON object in a request's body.

    Raises:
        CallRefused: the body is not a JSON object.
    """
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # possibly half of a surrogate pair, which no tokenizer accepts
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the body is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CallRefused("the body is not a JSON object")
    return value


def parse_chat(body: JsonObject, model: str) -> ChatRequest:
    """Parse a request to /chat/completions for the policy, whose name is `model`.

    Raises:
        CallRefused: the request is invalid or not supported.
    """
    _check_parameters(body, model)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages", messages, "it has to be a list with at least one message")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        _refuse("tools", tools, "it has to be a list of functions: {type: function, function: {name, ...}}")
    used_tools = () if body.get("tool_choice") == "none" else tuple(tools)
    return ChatRequest(tuple(map(_message, messages, range(len(messages)))), used_tools, _max_tokens(body))


def parse_text(body: JsonObject, model: str) -> TextRequest:
    """Parse a request to /completions for the policy, whose name is `model`.

    Raises:
        CallRefused: the request is invalid or not supported.
    """
    _check_parameters(body, model)
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return TextRequest(prompt, _max_tokens(body))
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        _refuse("prompt", prompt, "it has to be one text or one list of token ids, and not empty")
    return TextRequest(tuple(prompt), _max_tokens(body))


def _check_parameters(body: JsonObject, model: str) -> None:
    if body.get("model") != model:
        what = f"The model {body.get('model')!r:.80} does not exist here. The policy is {model!r} (endpoint.model)"
        raise CallRefused(what, status=404, code="model_not_found", param="model")
    if not isinstance(options := body.get("stream_options") or {}, dict):
        _refuse("stream_options", options, "it has to be an object")
    for name, value in body.items():
        if name in READ or name in RUN_SETTINGS or name in NO_EFFECT or value is None:
            continue
        if value not in NEUTRAL.get(name, ()):
            raise CallRefused(f"{name}={value!r:.80} is not supported", code="unsupported_parameter", param=name[:80])


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise CallRefused(f"{name}={value!r:.80}: {why}", code="invalid_value", param=name)


def _max_tokens(body: JsonObject) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                _refuse(name, value, "it has to be a whole number above 0")
            return value
    return None


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(message: Any, index: int) -> JsonObject:
    name = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        _refuse(name, message, f"its role has to be one of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    result: JsonObject = {"role": role, "content": _content(message.get("content"), f"{name}.content")}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or not all(map(_is_function, calls)):
            _refuse(f"{name}.tool_calls", calls, "it has to be a list of calls of functions")
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in calls
        ]
    named = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    return result | named


def _content(content: object, name: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        _refuse(name, content, "it has to be a text, or a list of parts of the type text")
    return "".join(part["text"] for part in parts)


def _arguments(arguments: object) -> object:
    """Return the arguments of a call as an object, as chat templates expect, if they are JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def chat_completion(answer: Completion, index: int, model: str) -> JsonObject:
    """Return the body of a response of /chat/completions; `index` is unique in the run."""
    choice = {"index": 0, "message": _assistant(answer), "logprobs": None, "finish_reason": answer.finish_reason}
    return _envelope("chat.completion", index, model, [choice]) | {"usage": _usage(answer)}


def chat_chunks(answer: Completion, index: int, model: str, *, with_usage: bool) -> Iterator[JsonObject]:
    """Yield the events of a stream of /chat/completions."""
    message = _assistant(answer)
    calls = [{"index": position, **call} for position, call in enumerate(answer.tool_calls)]
    deltas: list[JsonObject] = [{"role": "assistant", "content": message["content"]}]
    deltas += [{"tool_calls": calls}] if calls else []
    choices = [*((delta, None) for delta in deltas), ({}, answer.finish_reason)]
    for delta, reason in choices:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        yield _envelope("chat.completion.chunk", index, model, [choice])
    if with_usage:
        yield _envelope("chat.completion.chunk", index, model, []) | {"usage": _usage(answer)}


def text_completion(answer: Completion, index: int, model: str) -> JsonObject:
    """Return the body of a response of /completions, which also is the only event of its stream."""
    choice = {"index": 0, "text": answer.content, "logprobs": None, "finish_reason": answer.finish_reason}
    return _envelope("text_completion", index, model, [choice]) | {"usage": _usage(answer)}


def _assistant(answer: Completion) -> JsonObject:
    if not answer.tool_calls:
        return {"role": "assistant", "content": answer.content}
    return {"role": "assistant", "content": answer.content or None, "tool_calls": list(answer.tool_calls)}


def _envelope(kind: str, index: int, model: str, choices: Sequence[JsonObject]) -> JsonObject:
    return {"id": f"call-{index}", "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def _usage(answer: Completion) -> JsonObject:
    read, sampled = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
