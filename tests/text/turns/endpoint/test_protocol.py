"""Requests of OpenAI's clients: what is read, and what is an error of the call."""

import json

import pytest

from tether.text.turns.endpoint.protocol import (
    CallRefused,
    ChatRequest,
    Completion,
    TextRequest,
    chat_chunks,
    chat_completion,
    parse_chat,
    parse_json,
    parse_text,
    text_completion,
)

USER = {"role": "user", "content": "?"}
TOOL = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "ask", "arguments": '{"a": 1}'}}


def chat(**body: object) -> ChatRequest:
    return parse_chat({"model": "policy", "messages": [USER], **body}, "policy")


def refusal(parse: object, *arguments: object, **body: object) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        parse(*arguments, **body)
    return caught.value


def test_what_clients_send_is_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts, "name": "d"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    neutral = {"temperature": 0.1, "n": 1, "stop": None, "response_format": {"type": "text"}, "user": "me"}
    read = chat(messages=messages, tools=[TOOL], tool_choice="auto", max_completion_tokens=5, **neutral)
    called = {**CALL, "function": {"name": "ask", "arguments": {"a": 1}}}
    assert read == ChatRequest(
        (
            {"role": "system", "content": "ab", "name": "d"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ),
        (TOOL,),
        5,
    )
    assert chat(tools=[TOOL], tool_choice="none").tools == ()
    assert parse_text({"model": "policy", "prompt": "a", "max_tokens": 3}, "policy") == TextRequest("a", 3)
    assert parse_text({"model": "policy", "prompt": [1, 2]}, "policy") == TextRequest((1, 2))


def test_what_is_not_supported_is_an_error_of_the_call() -> None:
    """Each with the parameter at fault, as OpenAI's client shows it."""
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    cases = {
        "n": {"n": 2}, "stop": {"stop": ["\n"]}, "logprobs": {"logprobs": True},
        "tool_choice": {"tool_choice": "required"},
        "response_format": {"response_format": {"type": "json_object"}}, "whatever": {"whatever": 1},
        "max_tokens": {"max_tokens": 0}, "messages": {"messages": []}, "messages[0].content": {"messages": image},
        "messages[0]": {"messages": [{"role": "function", "content": "x"}]}, "tools": {"tools": [{"type": "mcp"}]},
        "messages[0].tool_calls": {"messages": [{**USER, "tool_calls": 1}]}, "stream_options": {"stream_options": 1},
        "model": {"model": "gpt-4o"},
    }  # fmt: skip
    for param, body in cases.items():
        error = refusal(chat, **body)
        assert (error.param, error.status) == (param, 404 if param == "model" else 400)
        assert error.body["error"]["type"] == "invalid_request_error"
    assert parse_json(b'{"a": ["\\uD83D", "\\ud83d\\ude00", "\\\\ud"]}') == {"a": ["?", "\U0001f600", "\\ud"]}
    for prompt in (None, "", [], ["a", "b"], [[1], [2]], [True]):
        assert refusal(parse_text, {"model": "policy", "prompt": prompt}, "policy").param == "prompt"
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 10**6):
        assert refusal(parse_json, body).status == 400


def test_answers_have_the_layout_of_openai() -> None:
    answer = Completion("", "tool_calls", 3, 2, (CALL,))
    whole = chat_completion(answer, 7, "policy")
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    chunks = list(chat_chunks(answer, 7, "policy", with_usage=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": None}, {"tool_calls": [{"index": 0, **CALL}]}, {},
    ]  # fmt: skip
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert text_completion(Completion("a", "stop", 1, 1), 7, "policy")["choices"][0]["text"] == "a"
    json.dumps([whole, chunks])
