"""Checks for mistakes in prompts that nothing else detects.

Each check returns None, or a sentence with the cause and the fix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.batch import TokenIds
from tether.text.data.prompts import PromptReport, decode, tokenize, write_conversation
from tether.types import Message

_REPLY = "REPLY"


def bos_problem(tokenizer: PreTrainedTokenizerBase, token_ids: TokenIds) -> str | None:
    """Find a doubled or missing beginning-of-sequence token.

    Args:
        tokenizer: the policy's. The token counts as missing only if the tokenizer adds it to plain text.
        token_ids: a prompt as the policy reads it, not truncated on the left.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    if token_ids[:2].tolist() == [bos, bos]:
        return (
            f"doubled BOS: the prompt begins with {tokenizer.bos_token!r} twice. The chat template or the row's text "
            "writes it again; remove one, for example with data.chat_template."
        )
    if token_ids[0] != bos and tokenizer("a")["input_ids"][0] == bos:
        return (
            f"missing BOS: the tokenizer begins every text with {tokenizer.bos_token!r}, this prompt does not. Let the "
            "chat template begin with {{ bos_token }}, for example with data.chat_template."
        )
    return None


def template_problem(
    tokenizer: PreTrainedTokenizerBase, token_ids: TokenIds, messages: Sequence[Message]
) -> str | None:
    """Find a prompt that is only the text of its messages, without roles or turn markers.

    Args:
        tokenizer: the policy's.
        token_ids: a prompt as the policy reads it.
        messages: messages of the prompt; empty for a custom dataset without them.
    """
    text = tokenizer.decode(token_ids.tolist())
    assert isinstance(text, str)
    text = _dense(text.removeprefix(tokenizer.bos_token or ""))
    content = _dense("".join(message["content"] for message in messages))
    if not content or text not in content:
        return None
    return (
        "chat template not applied: the prompt is the messages' bare text, so a chat model is not asked to reply. "
        "Give the model's template with data.chat_template, or use a model whose tokenizer has one."
    )


def opening_problem(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat_template: str | None,
    template_kwargs: Mapping[str, Any],
) -> str | None:
    """Find a chat template that has an opening of the assistant's turn but does not append it to a prompt.

    Args:
        tokenizer: the policy's.
        messages: messages of a prompt; empty for a custom dataset without them.
        chat_template: a Jinja template that replaces the tokenizer's.
        template_kwargs: further variables of the template.
    """
    has_template = chat_template or tokenizer.chat_template
    if not has_template or not messages or messages[-1].get("role") == "assistant":
        return None
    arguments = {"chat_template": chat_template, **template_kwargs, "add_generation_prompt": True}
    prompt = write_conversation(messages, tokenizer, **arguments)
    replied = write_conversation([*messages, {"role": "assistant", "content": _REPLY}], tokenizer, **arguments)
    opening, _, _ = replied.removeprefix(prompt).rpartition(_REPLY)
    if not replied.startswith(prompt) or not opening.strip():
        return None
    return (
        f"no opening of the assistant's turn: the chat template writes {opening!r} before a reply, but the prompt ends "
        "without it, so the policy has to write it itself. Let the template write it where add_generation_prompt is "
        "set (data.chat_template)."
    )


def turn_end_problem(
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    chat_template: str | None,
    template_kwargs: Mapping[str, Any],
) -> str | None:
    """Find a token that ends the assistant's turn in the chat template or tokenizer, but is not a stop token."""
    expected = {"the tokenizer's eos_token is": tokenizer.eos_token_id}
    if chat_template or tokenizer.chat_template:
        arguments = {"chat_template": chat_template, **template_kwargs, "add_generation_prompt": False}
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
        after = write_conversation(conversation, tokenizer, **arguments).rpartition(_REPLY)[2]
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        written = [token for token in tokenize([after], tokenizer)[0].tolist() if token in special]
        expected = {"the chat template ends the assistant's turn with": written[0] if written else None} | expected
    for what, token in expected.items():
        if token is not None and token not in ends:
            return (
                f"{what} {decode(tokenizer, [token])!r}, which is not among the end-of-sequence tokens {sorted(ends)}. "
                f"Add {token} to eos_token_id in the model's generation_config.json; else responses run on after it."
            )
    return None


def repeated_problem(report: PromptReport, num_prompts: int) -> str | None:
    """Find validation prompts that repeat, or that are also training prompts."""
    if not report.num_trained and report.num_distinct == num_prompts:
        return None
    return (
        f"validation: {report.num_distinct} of {num_prompts} prompts are distinct, and {report.num_trained} are in the "
        "training data, so the score is not that of as many unseen questions. Take such rows out of data.val_files."
    )


def cut_problem(report: PromptReport) -> str | None:
    """Find prompts that `max_prompt_length` truncated, and say which side was removed."""
    if not report.num_truncated:
        return None
    lost = {
        "left": "their beginning (the system message, perhaps the question)",
        "right": "their end (the question's end and the opening of the assistant's turn)",
        "middle": "their middle",
    }[report.truncation]
    return (
        f"prompt cut: {report.num_truncated} of {report.num_chosen} prompts lost {lost}, down to "
        f"data.max_prompt_length={report.max_prompt_length} tokens; the longest had {report.longest}. Raise it, or "
        "leave such rows out with data.filter_overlong_prompts=True."
    )


def control_token_problem(report: PromptReport) -> str | None:
    """Find messages that contain control tokens, which act as if the template had written them."""
    if not report.control_tokens:
        return None
    counts = ", ".join(f"{token} in {rows}" for token, rows in report.control_tokens.items())
    return (
        f"control tokens in messages: of {report.num_chosen} prompts {counts}. The model reads them as the template's "
        "own. Where they are meant as text set data.control_tokens_as_text=True."
    )


def _dense(text: str) -> str:
    return "".join(text.split())
