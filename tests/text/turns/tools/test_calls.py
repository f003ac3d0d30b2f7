"""Calls that models write, and how answers are cut."""

import pytest

from tether.text.turns.tools import FORMATS, Call, shortened

HERMES, LLAMA3 = FORMATS["hermes"], FORMATS["llama3_json"]


def test_hermes_calls():
    first, second = '{"name": "a", "arguments": {"x": 1}}', '{"name":"b"}'
    text = f"Let me see.\n<tool_call>\n{first}\n</tool_call><tool_call>{second}</tool_call>"
    assert HERMES(text) == [Call("a", {"x": 1}), Call("b")]
    assert HERMES('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}') == [Call("a", {"x": 1})]
    assert HERMES("No call: {}") == []


@pytest.mark.parametrize("inner", ["", "{", "7", "[]", '{"name": 7}', '{"name": "a", "arguments": [1]}', "[" * 10**5])
def test_a_call_that_is_written_wrongly_is_one_all_the_same(inner):
    (parsed,) = HERMES(f"<tool_call>{inner}</tool_call>")
    assert parsed.problem.startswith("the call is not")


def test_calls_are_looked_for_after_the_last_thought():
    draft, call = '<tool_call>{"name": "draft"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>'
    assert HERMES(f"<think>I could write {draft}.</think>{call}") == [Call("a")]
    assert HERMES(f"{draft} or rather </think> no") == []  # the template may have opened the thought
    assert HERMES(f"{call}<think>and now {draft}") == [Call("a")]
    assert HERMES(f"<think>{draft}") == []
    assert LLAMA3('<think>{"name": "draft"}</think>{"name": "a"}') == [Call("a")]
    assert LLAMA3('{"name": "draft"}</think>') == []


def test_llama3_calls():
    assert LLAMA3('<|python_tag|>{"name": "a", "parameters": {"x": 1}}') == [Call("a", {"x": 1})]
    assert LLAMA3("The set {1}") == []


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "abcd...(truncated)"), ("right", "(truncated)...ghij"), ("middle", "ab...(truncated)...ij")],
)
def test_long_answers_are_cut(side, expected):
    assert shortened("abcdefghij", 4, side) == expected
    assert shortened("abcd", 4, side) == "abcd"
    assert "a" not in shortened("a", 0, side).replace("truncated", "")
