"""Builds a model for generation. It imports little, because the user waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.runtime.cache import cache_dir
from tether.runtime.machine import resolve_device, set_threads
from tether.text.data.prompts import dated_template, render, tokenize
from tether.text.data.rows import Row
from tether.text.loading import load_engine
from tether.text.models.load import load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.sampling.engine import NativeEngine
from tether.types import Message

Encode = Callable[[Sequence[Message]], list[int]]
"""Encodes a conversation as the token ids of the templated prompt."""


def build_generator(
    model: Path | str,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, object] | None = None,
    *,
    template_date: str | None = None,
    dtype: str = "auto",
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[NativeEngine, PreTrainedTokenizerBase, Encode]:
    """Return an engine for a model, its tokenizer, and the function that encodes a conversation.

    Args:
        model: a directory, a known name or a hub id.
        chat_template: a template to use instead of the tokenizer's.
        template_kwargs: further variables of the template.
        template_date: date in the template, as YYYY-MM-DD; None: today's.
        dtype: dtype of the weights; ``auto`` is the fastest one of this machine.
        num_threads: CPU threads; None: `tether.runtime.threads.num_threads`.
        trust_remote_code: whether to run Python code of the model's repository.

    Raises:
        ValueError: the model does not exist, or has no tokenizer.
    """
    set_threads(num_threads)
    path = resolve_model_path(str(model), cache_dir())
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    template = dated_template(tokenizer, chat_template, template_date)

    def encode(messages: Sequence[Message]) -> list[int]:
        row = Row(tuple(dict(message) for message in messages), "", None, file="prompts", number=0)
        return tokenize([render(row, tokenizer, template, template_kwargs or {})], tokenizer)[0].tolist()

    engine = load_engine(path, resolve_device("auto"), dtype, trust_remote_code=trust_remote_code)
    return engine, tokenizer, encode
