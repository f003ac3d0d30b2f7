"""Splits conversations written by chat templates into turns with roles, thoughts, tool calls and tool results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from tether.types import JsonObject

MARKER, TEXT, THOUGHT, CALL, RESULT = "marker", "text", "thought", "tool call", "tool result"
"""Kinds of spans; a marker is text of the template itself, such as ``<|im_start|>user``."""


@dataclass(frozen=True)
class Markup:
    """How a chat template marks the turns of a conversation.

    Args:
        opening: matches the beginning of a turn. The role is the group ``role``, or the name of the group that matches;
            the groups ``thought`` and ``call`` give the kind of the entire turn.
        closing: matches what the template writes after a turn.
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]


def _markup(opening: str, closing: str) -> Markup:
    return Markup(re.compile(opening), re.compile(closing))


MARKUPS: Mapping[str, Markup] = {
    "ChatML (Qwen, SmolLM, Hermes, Yi, phi-4)": _markup(
        r"<\|im_start\|>(?P<role>[^\n<]+)(?:\n|<\|im_sep\|>)", r"<\|im_end\|>\n?"
    ),
    "Llama 3 and 4": _markup(
        r"<\|(?:start_header_id|header_start)\|>(?P<role>[^<]+)<\|(?:end_header_id|header_end)\|>\n\n",
        r"<\|(?:eot_id|eom_id|eot|end_of_text)\|>",
    ),
    "Llama 2, Mistral": _markup(
        r"(?P<user>\[INST\] ?|<</SYS>>\n\n)|(?P<assistant>\[/INST\] ?|\[/TOOL_RESULTS\])"
        r"|(?P<system><<SYS>>\n|\[SYSTEM_PROMPT\]|\[AVAILABLE_TOOLS\])|(?P<tool>\[TOOL_RESULTS\] ?)",
        r"\[/(?:SYSTEM_PROMPT|AVAILABLE_TOOLS)\]|</s>|<s> ?",
    ),
    "Gemma": _markup(r"<start_of_turn>(?P<role>\w+)\n", r"<end_of_turn>\n?|<eos>"),
    "Phi-3, phi-4-mini, GLM, OLMo, Tulu, Zephyr": _markup(
        r"<\|(?P<role>system|user|assistant|observation|tool_response|tool(?=\|>\n))\|>\n?",
        r"(?:<\|end\|>|<\|endoftext\|>|</s>)\n?",
    ),
    "DeepSeek": _markup(
        r"(?P<user><｜User｜>)|(?P<assistant><｜Assistant｜>|<｜tool▁outputs▁end｜>)|(?P<tool><｜tool▁outputs▁begin｜>)",
        r"<｜end▁of▁sentence｜>",
    ),
    "Kimi": _markup(
        r"<\|im_(?:system\|>(?=tool<))?(?P<role>tool|system|user|assistant)(?:\|>)?[^<]*<\|im_middle\|>",
        r"<\|im_end\|>",
    ),
    "harmony (gpt-oss)": _markup(
        r"<\|start\|>(?P<role>[^<\s]+)(?:(?P<call> to=[^<]*)|[^<]*)"
        r"(?:<\|channel\|>(?:(?P<thought>analysis)(?! to=)|\w+)(?P<call_in_channel> ?to=[^<]*)?[^<]*)?"
        r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
        r"<\|(?:end|call|return)\|>",
    ),
    "Granite": _markup(r"<\|start_of_role\|>(?P<role>[^<]+)<\|end_of_role\|>", r"<\|end_of_text\|>\n?"),
    "Command": _markup(
        r"<\|START_OF_TURN_TOKEN\|><\|(?P<role>\w+)_TOKEN\|>(?:<\|START_RESPONSE\|>)?",
        r"(?:<\|END_RESPONSE\|>)?<\|END_OF_TURN_TOKEN\|>",
    ),
}
"""Families of models -> their markup."""
BEGINNING = re.compile(
    r"(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<\|endoftext\|>|<BOS_TOKEN>|\[gMASK\]<sop>)*\s*"
)
"""Matches the text before the first turn."""
ROLES = {
    "model": "assistant", "chatbot": "assistant", "ipython": "tool", "observation": "tool", "tool_response": "tool",
}  # fmt: skip
"""Names of roles in templates -> the usual names."""
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool"}
DELIMITERS = {
    THOUGHT: [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>")],
    CALL: [
        ("<tool_call>", "</tool_call>"),
        ("<|tool_call|>", "<|/tool_call|>"),
        ("<function_calls>", "</function_calls>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("[TOOL_CALLS]", ""),
        ("<|python_tag|>", ""),
    ],
    RESULT: [("<tool_response>", "</tool_response>"), ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")],
}
"""Kind -> begin and end of such spans within a turn; a span without an end extends to the end of the turn."""


def _within_turns(kinds: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for spans of these kinds, each in a group named after the kind."""
    groups = []
    for kind in kinds:
        patterns = [
            rf"{re.escape(begin)}[\s\S]*?(?:{re.escape(end)}|\Z)" if end else rf"{re.escape(begin)}[\s\S]*"
            for begin, end in DELIMITERS[kind]
        ]
        groups.append(f"(?P<{kind.replace(' ', '_')}>{'|'.join(patterns)})")
    return re.compile("|".join(groups))


# Users and tools may quote thoughts and calls, and system prompts show the format of calls, so these do not count.
BY_ROLE = {
    "assistant": _within_turns([THOUGHT, CALL]),
    "user": _within_turns([RESULT]),
    "tool": _within_turns([RESULT]),
}
ENDS_THOUGHT = re.compile(r"(?:(?!<think>)[\s\S])*?</think>")
"""Matches a thought that began in the prompt."""


@dataclass(frozen=True)
class Span:
    """A part of a turn that has one kind."""

    kind: str
    text: str


@dataclass(frozen=True)
class Turn:
    """The text written by one role, including the template's markers; the spans concatenate to the complete text."""

    role: str
    spans: Sequence[Span]


def split_turns(text: str) -> list[Turn]:
    """Return the turns of a text written by a chat template; empty if its markup is of no known model family."""
    openings = [(match.start(), markup) for markup in MARKUPS.values() if (match := markup.opening.search(text))]
    if not openings:
        return []
    markup = min(openings, key=lambda one: one[0])[1]
    turns, end = list[Turn](), 0
    role, kind, spans = "system", TEXT, list[Span]()
    if (beginning := BEGINNING.match(text)) and beginning[0]:
        spans.append(Span(MARKER, beginning[0]))
        end = beginning.end()
    for opening in markup.opening.finditer(text, end):
        turns.append(_turn(role, [*spans, *_spans(text[end : opening.start()], role, kind, markup)]))
        role, kind = _role_and_kind(opening)
        spans, end = [Span(MARKER, opening[0])], opening.end()
    turns.append(_turn(role, [*spans, *_spans(text[end:], role, kind, markup)]))
    return [turn for turn in turns if turn.spans]


def message_turn(message: JsonObject) -> Turn:
    """Return the turn of a dataset's message."""
    role, content = str(message.get("role", "")), message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    spans = list(_by_kind(text, role))
    if calls := message.get("tool_calls"):
        spans.append(Span(CALL, json.dumps(calls, ensure_ascii=False, indent=1)))
    return Turn(role, spans)


def shown_turns(turns: Iterable[Turn]) -> list[JsonObject]:
    """Return turns as JSON, without the template's markers and blank spans."""
    listed = []
    for turn in turns:
        spans = [asdict(span) for span in turn.spans if span.kind != MARKER and span.text.strip()]
        if spans:
            listed.append({"role": turn.role, "spans": spans})
    return listed


def _role_and_kind(opening: re.Match[str]) -> tuple[str, str]:
    groups = {name: text for name, text in opening.groupdict().items() if text is not None}
    written = groups.get("role", next(iter(groups))).lower()
    role = ROLES.get(written, written)
    # In harmony's format, the role is the name of a tool.
    if role not in KNOWN_ROLES and "call" in opening.re.groupindex:
        role = "tool"
    is_call = role == "assistant" and bool({"call", "call_in_channel"} & groups.keys())
    return role, CALL if is_call else THOUGHT if "thought" in groups else TEXT


def _turn(role: str, spans: Sequence[Span]) -> Turn:
    """Return a turn; the role is "tool" if a user's turn only consists of tool results."""
    kinds = {span.kind for span in spans if span.kind != MARKER and span.text.strip()}
    return Turn("tool" if kinds == {RESULT} else role, spans)


def _spans(text: str, role: str, kind: str, markup: Markup) -> Iterator[Span]:
    """Yield the spans of a turn, including the markers that close it."""
    end = 0
    for closing in markup.closing.finditer(text):
        yield from _by_kind(text[end : closing.start()], role, kind)
        yield Span(MARKER, closing[0])
        end = closing.end()
    yield from _by_kind(text[end:], role, kind)


def _by_kind(text: str, role: str, kind: str = TEXT) -> Iterator[Span]:
    """Yield the thoughts, calls and results in a text, and the text between them."""
    end = 0
    if kind == TEXT and role == "assistant" and (thought := ENDS_THOUGHT.match(text)):
        yield Span(THOUGHT, thought[0])
        end = thought.end()
    pattern = BY_ROLE.get(role) if kind == TEXT else None
    for match in pattern.finditer(text, end) if pattern else ():
        if between := text[end : match.start()]:
            yield Span(TEXT, between)
        yield Span(str(match.lastgroup).replace("_", " "), match[0])
        end = match.end()
    if text[end:]:
        yield Span(RESULT if role == "tool" and end == 0 else kind, text[end:])
