"""A model to ask. It imports little: whoever asks waits for it."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from tether.assembly.loading import load_engine
from tether.data.chat import render, tokenize
from tether.data.rows import Row
from tether.models.language.load import load_tokenizer
from tether.models.language.model_path import resolve_model_path
from tether.rollout.native.engine import NativeEngine
from tether.runtime.cache import cache_dir
from tether.runtime.machine import resolve_device, set_threads

Encode = Callable[[str, str | None], list[int]]
"""(user message, system message) -> the ids of the templated prompt."""


def build_generator(model: str) -> tuple[NativeEngine, PreTrainedTokenizerBase, Encode]:
    """An engine for a model, its tokenizer, and the encoding of a question."""
    set_threads(None)
    path = resolve_model_path(model, cache_dir())
    tokenizer = load_tokenizer(path)

    def encode(user: str, system: str | None) -> list[int]:
        before = ({"role": "system", "content": system},) if system else ()
        row = Row((*before, {"role": "user", "content": user}), "", None, file="the command line", number=0)
        return tokenize([render(row, tokenizer, None, {})], tokenizer)[0].tolist()

    return load_engine(path, resolve_device("auto"), "bfloat16"), tokenizer, encode
