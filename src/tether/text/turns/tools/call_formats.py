"""Parsing of tool calls in a model's text, and truncation of the tools' answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_CUT = "...(truncated)..."


@dataclass(frozen=True)
class Call:
    """A tool call; `problem` describes an error of its syntax."""

    name: str = ""
    arguments: dict[str, object] = field(default_factory=dict)
    problem: str = ""


def after_thought(text: str) -> str:
    """Return the text after the last ``<think>...</think>``; empty if the reasoning does not end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def before_calls(text: str) -> str:
    """Return what a turn with calls has before the first of them, reasoning included."""
    reasoning, end, answer = text.rpartition("</think>")
    said, tag, _ = answer.partition("<tool_call>")
    return (reasoning + end + (said if tag else "")).rstrip()


def hermes(text: str) -> list[Call]:
    """Parse calls of Qwen and Hermes models: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    return [_call(inner) for inner in _HERMES.findall(after_thought(text))]


def llama3_json(text: str) -> list[Call]:
    """Parse the call of a Llama 3 model, whose entire turn is ``{"name": ..., "parameters": {...}}``."""
    inner = after_thought(text).strip().removeprefix("<|python_tag|>").strip()
    return [_call(inner)] if inner.startswith("{") and inner.endswith("}") else []


FORMATS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes, "llama3_json": llama3_json}
"""`multi_turn.format` -> parser of the calls in a turn. New names also go into `tether.text.turns.config`."""


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


def shortened(text: str, limit: int, side: str) -> str:
    """Truncate a text to `limit` characters plus a mark at the cut, as verl does.

    Args:
        text: a tool's answer.
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
