"""Parsing of tool calls in a model's text, and truncation of tool responses."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from tether.text.turns.tools.response_templates import THOUGHT, WRITTEN_CALLS, WrittenCalls
from tether.types import JsonObject

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\]$", re.DOTALL)
_CUT = "...(truncated)..."


@dataclass(frozen=True)
class Call:
    """A tool call; `problem` describes an error of its syntax."""

    name: str = ""
    arguments: dict[str, object] = field(default_factory=dict)
    problem: str = ""
    id: str = ""
    """Id that the model assigned; empty if its format has none."""


@dataclass(frozen=True)
class CallFormat:
    """The format in which a model writes the calls of a turn."""

    find: Callable[[str, Sequence[JsonObject]], list[Call]]
    """Return the calls in a turn, given the schemas of the tools."""
    first_call: Callable[[str], int]
    """Return the index of the first call in the text of a turn after its thoughts."""
    thought: tuple[str, str] = THOUGHT
    """Text before and after a thought."""
    is_read_back: bool = False
    """Whether the chat template names a turn's calls in the replies, so that it needs the calls as data."""

    def before_calls(self, text: str) -> str:
        """Return the text of a turn before its first call, including reasoning."""
        answer = text.rpartition(self.thought[1])[2]
        return text[: len(text) - len(answer) + self.first_call(answer)].rstrip()


def after_thought(text: str, marks: tuple[str, str] = THOUGHT) -> str:
    """Return the text after the last thought; empty if the reasoning does not end.

    Args:
        text: a turn.
        marks: text before and after a thought.
    """
    begin, end = marks
    return text.rpartition(end)[2].partition(begin)[0]


def hermes(text: str, tools: Sequence[JsonObject]) -> list[Call]:
    """Parse calls of Qwen and Hermes models: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    return [_call(inner) for inner in _HERMES.findall(after_thought(text))]


def llama3_json(text: str, tools: Sequence[JsonObject]) -> list[Call]:
    """Parse the call of a Llama 3 model, whose entire turn is ``{"name": ..., "parameters": {...}}``."""
    inner = after_thought(text).strip().removeprefix("<|python_tag|>").strip()
    return [_call(inner)] if inner.startswith("{") and inner.endswith("}") else []


def pythonic(text: str, tools: Sequence[JsonObject]) -> list[Call]:
    """Parse calls of Llama 3.2 and 4, whose entire turn is a list of Python: ``[name(key="value"), ...]``."""
    inner = after_thought(text).strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not _PYTHONIC.match(inner):
        return []
    try:
        expression = ast.parse(inner, mode="eval").body
        return [_python_call(call) for call in getattr(expression, "elts", [expression])]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return [Call(problem="the calls are not of the form [name(key=value, ...), ...] with values that JSON has")]


def _python_call(call: ast.expr) -> Call:
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return Call(ast.unparse(call.func), json.loads(json.dumps(arguments)))


def _by_template(written: WrittenCalls) -> CallFormat:
    """Return a format that transformers parses by a response template."""

    @cache
    def template() -> ResponseTemplate:
        from transformers.utils.chat_parsing.response_templates import load_response_template  # takes seconds

        return load_response_template(written.template)

    def find(text: str, tools: Sequence[JsonObject]) -> list[Call]:
        from transformers.utils.chat_parsing import parse_response

        answer = after_thought(text, written.thought)
        try:
            found = parse_response(answer, template(), prefix="", tools=list(tools)).get("tool_calls", [])
        except (ValueError, RecursionError) as error:  # the message repeats the text before the reason
            return [Call(problem=f"the call is not valid JSON ({str(error).rpartition('Error: ')[2]})")]
        if not found and written.mark not in answer:
            return []
        if not found or not all(isinstance(call["function"]["arguments"], dict) for call in found):
            return [Call(problem=f"the call is not of the form {written.example}")]
        return [Call(call["function"]["name"], call["function"]["arguments"], id=call.get("id", "")) for call in found]

    def first_call(answer: str) -> int:
        match = template().fields["tool_calls"].open_re.search(answer)
        return int(match.start()) if match else len(answer)

    return CallFormat(find, first_call, written.thought, written.is_read_back)


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(hermes, lambda answer: answer.find("<tool_call>")),
    "llama3_json": CallFormat(llama3_json, lambda answer: 0),
    "pythonic": CallFormat(pythonic, lambda answer: 0),
    **{name: _by_template(written) for name, written in WRITTEN_CALLS.items()},
}
"""`multi_turn.format` -> format of calls. New names also have to be added to `tether.text.turns.config`."""


def _call(inner: str) -> Call:
    try:
        call = json.loads(inner)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not valid JSON ({error})")
    arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, Mapping) else None
    if isinstance(arguments, str):  # some models write JSON inside JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return Call(problem='the call is not of the form {"name": "...", "arguments": {...}}')
    return Call(call["name"], arguments)


def openai_call(call: Call, default_id: str) -> JsonObject:
    """Return a call in the format of OpenAI's API, which chat templates read.

    Args:
        call: the call; one that could not be parsed is named `unreadable`.
        default_id: its id if the model assigned none.
    """
    function = {"name": call.name or "unreadable", "arguments": call.arguments}
    return {"id": call.id or default_id, "type": "function", "function": function}


def shortened(text: str, limit: int, side: str) -> str:
    """Truncate a text to `limit` characters plus a mark where it was cut, as verl does.

    Args:
        text: a tool's response.
        limit: maximum number of characters.
        side: which end is kept: `left`, `right`, or both (`middle`).
    """
    if len(text) <= limit:
        return text
    if side == "left":
        return text[:limit] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - limit :]
    half = limit // 2
    return text[:half] + _CUT + text[len(text) - half :]
