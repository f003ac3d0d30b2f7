"""How models write tool calls, as response templates of transformers (`transformers.utils.chat_parsing`).

Each follows the chat template that is shipped with the models. Values that a template writes as bare text get their
type from the schema of the tool.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.types import JsonObject

THOUGHT = ("<think>", "</think>")
"""Text before and after the thoughts of most models."""


@dataclass(frozen=True)
class WrittenCalls:
    """How the calls of a turn are written."""

    mark: str
    """Text that only a call contains."""
    example: str
    """A call, for messages."""
    template: JsonObject
    """The response template, with the field `tool_calls`."""
    is_read_back: bool = False
    """Whether the chat template names a turn's calls in the replies, so that it needs them as data."""
    thought: tuple[str, str] = THOUGHT
    """Text before and after thoughts, which are not searched for calls."""


def _template(opening: str, closing: str, content: JsonObject) -> JsonObject:
    """Return the response template of calls between two patterns.

    Args:
        opening: pattern before the arguments, with the group `name` and, if the model assigns ids to calls, `id`.
        closing: pattern after them.
        content: how the arguments are written.
    """
    call: JsonObject = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    if "(?P<id>" in opening:
        call["id"] = "{id}"
    calls = {"open_pattern": opening, "close_pattern": closing, "repeats": True, "transform": call, **content}
    return {"start_anchor": "<unused>", "fields": {"tool_calls": calls}}


def _tags(pattern: str) -> JsonObject:
    """Return a description of arguments that are tags; the pattern has the groups `key` and `value`."""
    text = {"name": "text", "args": {"strip": False}}
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": text}}


_JSON: JsonObject = {"content": "json"}

WRITTEN_CALLS = {
    "qwen3_coder": WrittenCalls(
        "<function=",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        _template(
            r"(?:<tool_call>\s*)?<function=(?P<name>[^\n>]+)>",
            r"</function>\s*(?:</tool_call>)?",
            _tags(r"<parameter=(?P<key>[^\n>]+)>\n?(?P<value>.*?)\n?</parameter>"),
        ),
    ),
    "glm": WrittenCalls(
        "<tool_call>",
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        _template(
            r"<tool_call>\s*(?P<name>[^\s<{]+)",
            "</tool_call>",
            _tags(r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ),
    ),
    "kimi": WrittenCalls(
        "<|tool_call_begin|>",
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
        _template(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>",
            _JSON,
        ),
        is_read_back=True,
    ),
    "deepseek_v3": WrittenCalls(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
        _template(  # V3 and R1 write `function<sep>NAME` and a block of Markdown with the arguments, V3.1 `NAME<sep>`
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\s`<{]+)(?:\s*```json|<｜tool▁sep｜>)",
            r"(?:```\s*)?<｜tool▁call▁end｜>",
            _JSON,
        ),
    ),
    "gemma4": WrittenCalls(
        "<|tool_call>",
        '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>',
        _template(
            r"<\|tool_call>call:(?P<name>[^\s{]+)",
            r"<tool_call\|>",
            _JSON | {"content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True}},
        ),
        is_read_back=True,
        thought=("<|channel>thought", "<channel|>"),
    ),
    "gpt-oss": WrittenCalls(
        "to=functions.",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}",
        _template(  # the model names the function behind the channel, and the chat template before it
            r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>commentary\s*)?to=functions\.(?P<name>[^\s<]+)\s*"
            r"(?:<\|channel\|>commentary\s*)?(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
            r"<\|call\|>",
            _JSON,
        ),
        is_read_back=True,
        thought=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
}
"""`multi_turn.format` -> how models with this format write calls."""
