"""Calls that models write, and how answers are cut."""

import pytest

from tether.text.turns.tools import FORMATS, Call, shortened


def hermes(text):
    return FORMATS["hermes"].find(text, ())


def llama3(text):
    return FORMATS["llama3_json"].find(text, ())


def test_hermes_calls():
    first, second = '{"name": "a", "arguments": {"x": 1}}', '{"name":"b"}'
    text = f"Let me see.\n<tool_call>\n{first}\n</tool_call><tool_call>{second}</tool_call>"
    assert hermes(text) == [Call("a", {"x": 1}), Call("b")]
    assert hermes('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}') == [Call("a", {"x": 1})]
    assert hermes("No call: {}") == []


@pytest.mark.parametrize("inner", ["", "{", "7", "[]", '{"name": 7}', '{"name": "a", "arguments": [1]}', "[" * 10**5])
def test_a_call_that_is_written_wrongly_is_one_all_the_same(inner):
    (parsed,) = hermes(f"<tool_call>{inner}</tool_call>")
    assert parsed.problem.startswith("the call is not")


def test_calls_are_looked_for_after_the_last_thought():
    draft, call = '<tool_call>{"name": "draft"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>'
    assert hermes(f"<think>I could write {draft}.</think>{call}") == [Call("a")]
    assert hermes(f"{draft} or rather </think> no") == []  # the template may have opened the thought
    assert hermes(f"{call}<think>and now {draft}") == [Call("a")]
    assert hermes(f"<think>{draft}") == []
    assert llama3('<think>{"name": "draft"}</think>{"name": "a"}') == [Call("a")]
    assert llama3('{"name": "draft"}</think>') == []


def test_llama3_calls():
    assert llama3('<|python_tag|>{"name": "a", "parameters": {"x": 1}}') == [Call("a", {"x": 1})]
    assert llama3("The set {1}") == []


TYPED = {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}
WRITTEN: dict[str, list[tuple[str, str, list[Call]]]] = {
    "pythonic": [
        ("", "[f(n=-3, s='a]b'), g.h()]", [Call("f", {"n": -3, "s": "a]b"}), Call("g.h")]),
        ("", "<|python_start|>[f(d={'a': [None, True]})]<|python_end|>", [Call("f", {"d": {"a": [None, True]}})]),
    ],
    "qwen3_coder": [
        (
            "<think>\nOr <function=g>?\n</think>\n\nI look.",
            "\n\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n  x = 1\n\n  y\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=s>\n3\n</parameter>\n</function>\n</tool_call>",
            [Call("f", {"n": 3, "s": "  x = 1\n\n  y"}), Call("f", {"s": "3"})],
        ),
        ("", "<function=f>\n</function>", [Call("f")]),  # Qwen3-Coder leaves the tag around it out at times
    ],
    "glm": [
        (
            "\n<think>z</think>\nI look.",
            "\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>s</arg_key>\n<arg_value>3</arg_value>\n"
            "</tool_call>\n<tool_call>g\n</tool_call>",
            [Call("f", {"n": 3, "s": "3"}), Call("g")],
        ),
    ],
    "kimi": [
        (
            "I look.",
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 3}'
            "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            [Call("f", {"n": 3}, id="functions.f:0"), Call("g", id="functions.g:1")],
        ),
    ],
    "deepseek_v3": [
        (
            "I look.",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 3}\n```'
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [Call("f", {"n": 3}), Call("g")],
        ),
        (
            "Hm</think>",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>'
            "function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [Call("f", {"n": 3}), Call("function")],
        ),
    ],
    "gemma4": [
        (
            "<|channel>thought\n<|tool_call>call:g{}<tool_call|><channel|>I look.",
            '<|tool_call>call:f{n:3,s:<|"|>a, b: "c"<|"|>,l:[1,2]}<tool_call|><|tool_call>call:g{}<tool_call|>',
            [Call("f", {"n": 3, "s": 'a, b: "c"', "l": [1, 2]}), Call("g")],
        ),
    ],
    "gpt-oss": [
        (
            "<|channel|>analysis<|message|>to=functions.g<|message|>{}<|end|>",
            '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}',
            [Call("f", {"n": 3})],
        ),
        ("", ' to=functions.f<|channel|>commentary json<|message|>{"n": 3}<|call|>', [Call("f", {"n": 3})]),
    ],
}  # fmt: skip
"""Format -> what a turn has before its calls, these as the models' own chat templates write them, and what they are."""
NO_CALLS = {
    "pythonic": ["[1, 2]", "[f(x=1)] or not", "f(x=1)"],
    "gpt-oss": ["<|channel|>final<|message|>f(1)", "<|channel|>analysis<|message|>to=functions.g<|message|>{}"],
    "gemma4": ["<|channel>thought\n<|tool_call>call:g{}<tool_call|>"],
    "qwen3_coder": ["<think><function=f></function>", "A function."],
}
"""Format -> turns without a call, some of them with one in a thought that does not end."""
BROKEN = {
    "pythonic": ["[f(3)]", "[f(x=y)]", "[f(x=1), 7]", "[f(x=1]", "[f(**{})]", "[f(x={1})]", f"[f(x={'(' * 10**4})]"],
    "qwen3_coder": ["<tool_call>\n<function=f"],
    "glm": ['<tool_call>{"name": "f"}</tool_call>'],
    "kimi": [
        f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{i}<|tool_call_end|>" for i in ('{"n"', "[3]")
    ],
    "deepseek_v3": ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>"],
    "gemma4": ["<|tool_call>f{}<tool_call|>", "<|tool_call>call:f{n:}<tool_call|>"],
    "gpt-oss": ["to=functions.f", "to=functions.f <|message|>{"],
}


def test_calls_are_read_as_the_models_write_them():
    wrong = []
    for name, turns in WRITTEN.items():
        for before, written, calls in turns:
            form = FORMATS[name]
            read = form.find(before + written, [TYPED]), form.before_calls(before + written)
            wrong += [(name, read)] if read != (calls, before) else []
    assert wrong == []


def test_a_turn_without_a_call_has_none_and_a_broken_call_is_one_problem():
    assert {
        text: calls for name in NO_CALLS for text in NO_CALLS[name] if (calls := FORMATS[name].find(text, ()))
    } == {}
    for name, texts in BROKEN.items():
        for text in texts:
            (call,) = FORMATS[name].find(text, ())
            assert "not of the form" in call.problem or "not valid JSON (" in call.problem, (name, text, call)
            assert "0x" not in call.problem, "the policy reads it, and so it must be the same in every process"


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "abcd...(truncated)"), ("right", "(truncated)...ghij"), ("middle", "ab...(truncated)...ij")],
)
def test_long_answers_are_cut(side, expected):
    assert shortened("abcdefghij", 4, side) == expected
    assert shortened("abcd", 4, side) == "abcd"
    assert "a" not in shortened("a", 0, side).replace("truncated", "")
