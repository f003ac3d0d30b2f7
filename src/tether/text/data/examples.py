"""Tokens of conversations, and which of them fine-tuning trains on: those of the assistant, found by the chat template.

A template may mark them with ``{% generation %}``, as transformers defines it. Otherwise the text up to each assistant
message is rendered twice: with only the opening of its turn, and with the message. What the second text adds is the
assistant's, up to the last character that is not white space. Both texts must be prefixes of the rendered full
conversation, which is what is tokenized.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tether.batch import TokenIds
from tether.runtime.terminal import Screen, Waiting
from tether.text.data.chats import ChatRow
from tether.text.data.prompts import PromptOptions, apply_template, choose_rows, truncate_ids, write_conversation
from tether.text.data.rows import raise_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Example:
    """The tokens of a conversation up to the last one that is trained on; the first one is never trained on."""

    token_ids: TokenIds
    mask: NDArray[np.bool_]
    """Whether each token is trained on."""
    place: str
    """File and row, for error messages."""


class ExampleDataset:
    """The examples of a dataset, a sequence of `Example`.

    Args:
        rows: the conversations.
        tokenizer: tokenizer of the policy.
        options: settings of the conversion; ``max_prompt_length`` limits the full conversation.

    Raises:
        ValueError: the template refuses a conversation or does not mark the assistant's tokens, or conversations are
            too long; lists up to ten rows.
    """

    def __init__(self, rows: Sequence[ChatRow], tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> None:
        if not (options.chat_template or tokenizer.chat_template):
            raise ValueError(
                f"{tokenizer.name_or_path}: its tokenizer has no chat template, so conversations can't be written as "
                "tokens. Take the model's chat (instruct) version, or give a Jinja template with data.chat_template."
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"{tokenizer.name_or_path}: its tokenizer is a slow one, which does not report the position of tokens "
                "in the text. Give a fast one with actor_rollout_ref.model.tokenizer_path."
            )
        self._examples: list[Example] = []
        chosen = [rows[index] for index in choose_rows(len(rows), options)]
        dropped, truncated, problems = 0, 0, list[str]()
        with Waiting("preparing conversations", len(chosen), Screen(stderr=True), late=True) as waiting:
            for row in waiting.each(chosen):
                try:
                    example = _example(row, tokenizer, options)
                except ValueError as error:
                    problems.append(f"{row.place}: {error}")
                    continue
                if example is None:
                    dropped += 1
                    continue
                truncated += example[1]
                self._examples.append(example[0])
        raise_problems(problems)
        if not self._examples:
            raise ValueError(f"all {dropped} conversations have more than data.max_length tokens. Raise it.")
        tokens, learned = (sum(int(count) for count in counts) for counts in zip(*map(_counts, self), strict=True))
        words = [f"{len(self)} conversations, {tokens} tokens, {learned} of them the assistant's"]
        words += [f"{dropped} longer than {options.max_prompt_length} tokens dropped"] if dropped else []
        words += [f"{truncated} cut to {options.max_prompt_length} tokens ({options.truncation})"] if truncated else []
        self.report = ", ".join(words)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self._examples)

    def first_out_of_vocabulary(self, vocabulary: int) -> str | None:
        """Describe the first conversation with a token id outside of a vocabulary of this size; None if there is
        none."""
        for example in self._examples:
            if example.token_ids.max() >= vocabulary:
                return f"{example.place} has the token {example.token_ids.max()}"
        return None

    def fingerprint(self) -> str:
        """Return a hash of all tokens and masks."""
        digest = hashlib.sha256()
        for example in self._examples:
            digest.update(repr((example.token_ids.tolist(), example.mask.tolist())).encode())
        return digest.hexdigest()


def _counts(example: Example) -> tuple[int, int]:
    return len(example.token_ids), int(example.mask.sum())


def _example(row: ChatRow, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> tuple[Example, bool] | None:
    """Return the example of a conversation, and whether it was truncated; None if it is dropped for its length."""
    limit = options.max_prompt_length
    arguments = {"chat_template": options.chat_template, **options.chat_template_kwargs}
    token_ids, mask = assistant_mask(row.messages, tokenizer, arguments)
    length = len(token_ids)
    if length > limit and options.filter_overlong_prompts:
        return None
    if length > limit and options.truncation == "error":
        raise ValueError(
            f"the conversation has {length} tokens, more than data.max_length={limit}. Raise it, drop such rows with "
            "data.filter_overlong_prompts=True, or cut them with data.truncation=left|right|middle."
        )
    token_ids, mask = truncate_ids(token_ids, limit, options.truncation), truncate_ids(mask, limit, options.truncation)
    mask[:1] = False  # nothing predicts the first token
    if not mask.any():
        after = f" among the {limit} tokens that data.truncation={options.truncation} keeps" if length > limit else ""
        raise ValueError(f"the chat template marks no token of the assistant{after}, so there is nothing to learn.")
    end = int(mask.nonzero()[0][-1]) + 1
    return Example(token_ids[:end], mask[:end], row.place), length > limit


def assistant_mask(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> tuple[TokenIds, NDArray[np.bool_]]:
    """Return the token ids of a conversation, and which of them are the assistant's.

    Raises:
        ValueError: the template refuses the conversation, or renders a message differently when others follow.
    """
    template = tokenizer.get_chat_template(arguments.get("chat_template"))
    if _GENERATION.search(template):
        marked: Any = apply_template(
            messages, tokenizer, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
        )
        return np.array(marked["input_ids"], dtype=np.int32), np.array(marked["assistant_masks"], dtype=bool)
    text = write_conversation(messages, tokenizer, **arguments)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = write_conversation(messages[:index], tokenizer, add_generation_prompt=True, **arguments)
        complete = write_conversation(messages[: index + 1], tokenizer, **arguments)
        if not (text.startswith(complete) and complete.startswith(opened)):
            raise ValueError(
                f"the chat template writes message {index} differently when it is the last one, so which tokens are "
                "the assistant's is not known. Give each turn of the assistant as a row of its own, or a template "
                "with {% generation %} (data.chat_template)."
            )
        mask |= (ends > len(opened)) & (starts < len(complete.rstrip()))
    return np.array(encoded["input_ids"], dtype=np.int32), mask
