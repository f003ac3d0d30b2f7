"""Checks for mistakes in prompts that no single step notices.

Each check returns None, or a sentence that names the cause and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.batch import TokenIds
from tether.data.prompts import PromptReport
from tether.types import Message


def bos_problem(tokenizer: PreTrainedTokenizerBase, token_ids: TokenIds) -> str | None:
    """Find a doubled or missing beginning-of-sequence token.

    Args:
        tokenizer: the policy's. It is asked whether it begins plain text with the token; only then is one missed.
        token_ids: a prompt as the policy reads it, not cut on the left.
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
    """Find a prompt that is its messages' bare text: no role, no turn markers.

    Args:
        tokenizer: the policy's.
        token_ids: a prompt as the policy reads it.
        messages: what it was rendered from; empty where a custom dataset doesn't tell.
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


def repeated_problem(report: PromptReport, num_prompts: int) -> str | None:
    """Find validation prompts that say less than their number: repeats, and prompts that training has, too."""
    if not report.num_trained and report.num_distinct == num_prompts:
        return None
    return (
        f"validation: {report.num_distinct} of {num_prompts} prompts are distinct, and {report.num_trained} are in the "
        "training data, so the score is not that of as many unseen questions. Take such rows out of data.val_files."
    )


def cut_problem(report: PromptReport) -> str | None:
    """Find prompts that lost a part to `max_prompt_length`, and say which part."""
    if not report.num_cut:
        return None
    lost = {
        "left": "their beginning (the system message, perhaps the question)",
        "right": "their end (the question's end and the opening of the assistant's turn)",
        "middle": "their middle",
    }[report.truncation]
    return (
        f"prompt cut: {report.num_cut} of {report.num_chosen} prompts lost {lost}, down to "
        f"data.max_prompt_length={report.max_prompt_length} tokens; the longest had {report.longest}. Raise it, or "
        "leave such rows out with data.filter_overlong_prompts=True."
    )


def control_token_problem(report: PromptReport) -> str | None:
    """Find messages that hold control tokens, which end turns and open others as if the template had written them."""
    if not report.control_tokens:
        return None
    counts = ", ".join(f"{token} in {rows}" for token, rows in report.control_tokens.items())
    return (
        f"control tokens in messages: of {report.num_chosen} prompts {counts}. The model reads them as the template's "
        "own. Where they are meant as text set data.control_tokens_as_text=True."
    )


def _dense(text: str) -> str:
    return "".join(text.split())
