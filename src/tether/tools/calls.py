"""Calls of tools in the words of a model, and the length of what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_CUT = "...(truncated)..."


@dataclass(frozen=True)
class Call:
    """One call; `problem` says what is wrong with how it is written."""

    name: str = ""
    arguments: dict[str, object] = field(default_factory=dict)
    problem: str = ""


def after_thought(text: str) -> str:
    """What a turn says after its last thought, ``<think>...</think>``; nothing of one that does not end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def hermes(text: str) -> list[Call]:
    """Calls as Qwen and Hermes write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    return [_call(inner) for inner in _HERMES.findall(after_thought(text))]


def llama3_json(text: str) -> list[Call]:
    """One call as Llama 3 writes it: the whole turn is ``{"name": ..., "parameters": {...}}``."""
    inner = after_thought(text).strip().removeprefix("<|python_tag|>").strip()
    return [_call(inner)] if inner.startswith("{") and inner.endswith("}") else []


FORMATS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes, "llama3_json": llama3_json}
"""`multi_turn.format` -> what it finds in a turn of the policy."""


def _call(inner: str) -> Call:
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not valid JSON ({error})")
    arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, Mapping) else None
    if isinstance(arguments, str):  # some models write JSON inside JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str) or not isinstance(arguments, dict):
        return Call(problem='the call is not of the form {"name": "...", "arguments": {...}}')
    return Call(found["name"], arguments)


def shortened(text: str, limit: int, side: str) -> str:
    """At most `limit` characters of a text and a mark where it was cut, as verl has it.

    Args:
        text: of a tool.
        limit: characters.
        side: the part that is kept: `left`, `right`, or both ends (`middle`).
    """
    if len(text) <= limit:
        return text
    if side == "left":
        return text[:limit] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - limit :]
    half = limit // 2
    return text[:half] + _CUT + text[len(text) - half :]
