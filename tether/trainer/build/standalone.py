"""Parts of a run on their own: to score a checkpoint, to ask a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from tether.config import LoadedConfig
from tether.data.chat import render, tokenize
from tether.data.rows import Row
from tether.execution.machine import cache_dir, resolve_device, set_threads
from tether.models.load import load_causal_lm, load_tokenizer
from tether.models.resolve import resolve_model_path
from tether.rewards.router import check_sources
from tether.rollout.native import NativeEngine, eos_token_ids
from tether.trainer.build.inputs import build_dataset, build_rewards, build_tokenizer
from tether.trainer.build.learners import DTYPES, on_device
from tether.trainer.build.run import validation_sampling
from tether.trainer.collect import Collector
from tether.trainer.evaluate import Evaluation

Encode = Callable[[str, str | None], list[int]]
"""(user message, system message) -> the ids of the templated prompt."""


@contextmanager
def build_evaluator(loaded: LoadedConfig, model_dir: Path) -> Iterator[tuple[Evaluation, Collector]]:
    """The validation of a configuration for the model in `model_dir`.

    Raises:
        ValueError: no ``data.val_files``, or unusable inputs.
    """
    config = loaded.config
    if not config.data.val_files:
        raise ValueError(
            "data.val_files: nothing to evaluate on. Give held-out prompts, for example data.val_files=FILE"
        )
    set_threads(config.trainer.num_threads)
    tokenizer = build_tokenizer(config, model_dir)
    dataset = build_dataset(config, tokenizer, config.data.val_files, config.data.val_max_samples, shuffle=False)
    if config.custom_reward_function.path is None:
        check_sources(dataset.data_sources())
    engine = _engine(model_dir, resolve_device(config.trainer.device), config.actor_rollout_ref.rollout.dtype)
    evaluation = Evaluation(dataset, validation_sampling(config), config.data.val_batch_size)
    with build_rewards(config) as rewards:
        yield evaluation, Collector(engine, rewards, tokenizer, config.reward_model.max_error_rate)


def build_generator(model: str) -> tuple[NativeEngine, PreTrainedTokenizerBase, Encode]:
    """An engine for a model, its tokenizer, and the encoding of a question."""
    set_threads(None)
    path = resolve_model_path(model, cache_dir())
    tokenizer = load_tokenizer(path)

    def encode(user: str, system: str | None) -> list[int]:
        before = ({"role": "system", "content": system},) if system else ()
        row = Row((*before, {"role": "user", "content": user}), "", None, file="the command line", number=0)
        return tokenize([render(row, tokenizer, None, {})], tokenizer)[0].tolist()

    return _engine(path, resolve_device("auto"), "bfloat16"), tokenizer, encode


def _engine(model: Path | str, device: torch.device, dtype: str) -> NativeEngine:
    loaded = on_device(load_causal_lm(model, dtype=DTYPES[dtype]), device)
    return NativeEngine(loaded, eos_token_ids=eos_token_ids(loaded))
