"""Where the assistant's turn begins and ends, by the chat template: what a policy reads first and is stopped by."""

import pytest

from tests.tiny import CHATML, EOS, EOS_ID, PAD_ID, tiny_tokenizer
from tether.text.data.checks import opening_problem, turn_end_problem
from tether.text.data.prompts import render
from tether.text.data.rows import Row

QUESTION = [{"role": "user", "content": "2+2?"}]
TURNS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def row(messages):
    return Row(tuple(messages), data_source="s", ground_truth="4", file="rows.jsonl", number=0)


def test_a_last_message_of_the_assistant_is_continued():
    """Two turns of the assistant, one closed and one opened, are what no chat model was trained on."""
    started = [*QUESTION, {"role": "assistant", "content": "Let me think."}]
    text = render(row(started), tiny_tokenizer(), None, {})
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nLet me think."
    as_verl = render(
        row(started), tiny_tokenizer(), None, {"add_generation_prompt": True, "continue_final_message": False}
    )
    assert as_verl.endswith("Let me think.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (CHATML, None),
        (TURNS, r"'<\|im_start\|>assistant\\n'"),
        ("{{ messages[0]['content'] }}[/INST]{% for m in messages[1:] %} {{ m['content'] }}</s>{% endfor %}", None),
        (TURNS + "<|im_start|>assistant\n", None),  # always opened
    ],
)
def test_a_template_that_writes_no_opening_is_named(template, missing):
    problem = opening_problem(tiny_tokenizer(), QUESTION, template, {})
    assert (problem is None) == (missing is None)
    if missing:
        with pytest.raises(ValueError, match=missing):
            raise ValueError(problem)


def test_the_end_of_the_assistants_turn_has_to_end_responses():
    tokenizer = tiny_tokenizer()
    assert turn_end_problem(tokenizer, {EOS_ID}, None, {}) is None
    assert f"ends the assistant's turn with '{EOS}'" in turn_end_problem(tokenizer, {PAD_ID}, None, {})
    assert f"Add {EOS_ID} to eos_token_id" in turn_end_problem(tokenizer, {PAD_ID}, None, {})
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert "the tokenizer's eos_token is" in turn_end_problem(tokenizer, {PAD_ID}, bare, {})
