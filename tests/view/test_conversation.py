"""Conversations are split as the chat templates of well-known families write them, and no character is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.view.conversation import MARKER, message_turn, shown_turns, split_turns

SYSTEM, QUESTION, ANSWER, AGAIN, THOUGHT = "Be brief.", "What is 2 + 3?", "It is 5.", "Sure?", "Two and three."
CALL, RESULT = '{"name": "add", "arguments": {"a": 2, "b": 3}}', "5"

ASKED = [("system", "text", SYSTEM), ("user", "text", QUESTION)]
ANSWERED = [*ASKED, ("assistant", "text", ANSWER), ("user", "text", AGAIN), ("assistant", "text", "Yes.")]
WITH_TOOL = [
    *ASKED, ("assistant", "tool call", CALL), ("tool", "tool result", RESULT), ("assistant", "text", ANSWER),
]  # fmt: skip
THINKS = [*ASKED, ("assistant", "thought", THOUGHT), ("assistant", "text", ANSWER)]

# Family -> conversation as its template writes it, and what was said: (role, kind, content).
FAMILIES = {
    "Qwen 2.5": (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\n{AGAIN}<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>",
        ANSWERED,
    ),
    "Qwen 3 with tools": (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{CALL}\n</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>",
        [*ASKED, ("assistant", "thought", THOUGHT), *WITH_TOOL[2:]],
    ),
    "phi-4": (
        f"<|im_start|>system<|im_sep|>{SYSTEM}<|im_end|><|im_start|>user<|im_sep|>{QUESTION}<|im_end|>"
        f"<|im_start|>assistant<|im_sep|>{ANSWER}<|im_end|>",
        ANSWERED[:3],
    ),
    "Llama 3.1 with tools": (
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>{CALL}<|eom_id|>"
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{RESULT}<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{ANSWER}<|eot_id|>",
        WITH_TOOL,
    ),
    "Llama 2": (
        f"<s>[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\n{QUESTION} [/INST] {ANSWER} </s><s>[INST] {AGAIN} [/INST] Yes. </s>",
        ANSWERED,
    ),
    "Mistral with tools": (
        f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]{QUESTION}[/INST][TOOL_CALLS] [{CALL}]</s>"
        f"[TOOL_RESULTS] {RESULT}[/TOOL_RESULTS]{ANSWER}</s>",
        WITH_TOOL,
    ),
    "Magistral": (
        f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]{QUESTION}[/INST][THINK]{THOUGHT}[/THINK]{ANSWER}</s>",
        THINKS,
    ),
    "Gemma": (  # which has no system role
        f"<bos><start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n{ANSWER}<end_of_turn>\n"
        f"<start_of_turn>user\n{AGAIN}<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
        ANSWERED[1:],
    ),
    "Phi-3": (
        f"<|system|>\n{SYSTEM}<|end|>\n<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n{ANSWER}<|end|>\n"
        f"<|user|>\n{AGAIN}<|end|>\n<|assistant|>\nYes.<|end|>\n",
        ANSWERED,
    ),
    "phi-4-mini with tools": (
        f"<|system|>{SYSTEM}<|end|><|user|>{QUESTION}<|end|><|assistant|><|tool_call|>{CALL}<|/tool_call|><|end|>"
        f"<|tool_response|>{RESULT}<|end|><|assistant|>{ANSWER}<|end|>",
        WITH_TOOL,
    ),
    "DeepSeek V3 with tools": (
        f"<｜begin▁of▁sentence｜>{SYSTEM}<｜User｜>{QUESTION}<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        f"function<｜tool▁sep｜>add\n```json\n{CALL}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        f"<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{RESULT}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        f"{ANSWER}<｜end▁of▁sentence｜>",
        WITH_TOOL,
    ),
    "DeepSeek R1": (  # the prompt begins the thought
        f"<｜begin▁of▁sentence｜>{SYSTEM}<｜User｜>{QUESTION}<｜Assistant｜><think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
        "<｜end▁of▁sentence｜>",
        THINKS,
    ),
    "GLM 4.5 with tools": (
        f"[gMASK]<sop><|system|>\n{SYSTEM}<|user|>\n{QUESTION}<|assistant|>\n<think>{THOUGHT}</think>\n"
        f"<tool_call>{CALL}\n</tool_call><|observation|>\n<tool_response>\n{RESULT}\n</tool_response>"
        f"<|assistant|>\n<think></think>\n{ANSWER}",
        [*ASKED, ("assistant", "thought", THOUGHT), *WITH_TOOL[2:4], ("assistant", "thought", ""), WITH_TOOL[4]],
    ),
    "Kimi K2 with tools": (
        f"<|im_system|>system<|im_middle|>{SYSTEM}<|im_end|><|im_user|>user<|im_middle|>{QUESTION}<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        f"<|tool_call_argument_begin|>{CALL}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
        f"<|im_system|>tool<|im_middle|>## Return of functions.add:0\n{RESULT}<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>{ANSWER}<|im_end|>",
        WITH_TOOL,
    ),
    "gpt-oss": (
        f"<|start|>system<|message|>{SYSTEM}<|end|><|start|>user<|message|>{QUESTION}<|end|>"
        f"<|start|>assistant<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{CALL}<|call|>"
        f"<|start|>functions.add to=assistant<|channel|>commentary<|message|>{RESULT}<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>",
        [*ASKED, ("assistant", "thought", THOUGHT), *WITH_TOOL[2:]],
    ),
    "OLMo 2, Tulu 3": (
        f"<|endoftext|><|system|>\n{SYSTEM}\n<|user|>\n{QUESTION}\n<|assistant|>\n{ANSWER}<|endoftext|>\n"
        f"<|user|>\n{AGAIN}\n<|assistant|>\nYes.<|endoftext|>",
        ANSWERED,
    ),
    "Zephyr": (
        f"<|system|>\n{SYSTEM}</s>\n<|user|>\n{QUESTION}</s>\n<|assistant|>\n{ANSWER}</s>\n",
        ANSWERED[:3],
    ),
    "Granite": (
        f"<|start_of_role|>system<|end_of_role|>{SYSTEM}<|end_of_text|>\n"
        f"<|start_of_role|>user<|end_of_role|>{QUESTION}<|end_of_text|>\n"
        f"<|start_of_role|>assistant<|end_of_role|>{ANSWER}<|end_of_text|>",
        ANSWERED[:3],
    ),
    "Command R": (
        f"<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{SYSTEM}<|END_OF_TURN_TOKEN|>"
        f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{QUESTION}<|END_OF_TURN_TOKEN|>"
        f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{ANSWER}<|END_OF_TURN_TOKEN|>",
        ANSWERED[:3],
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_split_into_roles_thoughts_and_calls(name: str) -> None:
    text, said = FAMILIES[name]
    turns = split_turns(text)
    assert "".join(span.text for turn in turns for span in turn.spans) == text
    found = [(turn["role"], span["kind"], span["text"]) for turn in shown_turns(turns) for span in turn["spans"]]
    assert [one[:2] for one in found] == [one[:2] for one in said]
    for (_, kind, shown), (_, _, content) in zip(found, said, strict=True):
        assert content in shown
        assert kind != "text" or shown.strip() == content


@given(st.sampled_from(sorted(FAMILIES)), st.text(max_size=40), st.integers(0, 400))
def test_no_character_is_lost_whatever_is_said_and_wherever_it_is_cut(name: str, said: str, end: int) -> None:
    text = FAMILIES[name][0].replace(ANSWER, said)[:end]
    turns = split_turns(text)
    assert not turns or "".join(span.text for turn in turns for span in turn.spans) == text


def test_markup_of_others_is_text() -> None:
    """A family is recognised by what comes first, and only the policy thinks and calls."""
    quoted = "Explain <|user|>, [INST], <think>x</think> and <tool_call>{}</tool_call>."
    turns = split_turns(f"<|im_start|>system\n{quoted}<|im_end|>\n<|im_start|>user\n{quoted}<|im_end|>\n")
    assert [(turn.role, [span.text for span in turn.spans if span.kind != MARKER]) for turn in turns] == [
        ("system", [quoted]), ("user", [quoted])
    ]  # fmt: skip
    assert split_turns("No template at all, but 2 < 3 and |x| > 1.") == []
    cut = split_turns(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n{THOUGHT}")
    assert [span.kind for span in cut[-1].spans] == [MARKER, "thought"]


def test_messages_of_a_data_set_are_turns() -> None:
    """Also where the prompt began the thought, or the content is a list."""
    answer = message_turn({"role": "assistant", "content": f"{THOUGHT}\n</think>\n{ANSWER}", "tool_calls": [1]})
    assert [(span.kind, span.text.strip()) for span in answer.spans] == [
        ("thought", f"{THOUGHT}\n</think>"), ("text", ANSWER), ("tool call", "[\n 1\n]")
    ]  # fmt: skip
    assert message_turn({"role": "user", "content": [{"type": "image"}]}).spans[0].text == '[{"type": "image"}]'
