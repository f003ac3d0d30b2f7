"""Builds the training of a reward model on preference pairs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tether.integrations.reward_models.trainer import preference_accuracy, preference_batch, split_pairs
from tether.loop.engine import Learner, LossSpec, OptimizerOptions, UpdatePlan
from tether.runtime.cache import cache_dir
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import resolve_device
from tether.text.data.pairs import load_pairs
from tether.text.data.prompts import dated_template
from tether.text.learning.build import save_model
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.packing import MicroBatching
from tether.text.learning.pretraining import Pretraining
from tether.text.learning.scoring import PairForward, PairOutputs, PreferenceLoss
from tether.text.loading import DTYPES, number_format, on_device
from tether.text.models.critic import new_reward_model
from tether.text.models.layers import enable_gradient_checkpointing
from tether.text.models.load import load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.rewards.build import check_vocabulary


@dataclass(frozen=True)
class RewardTrainingOptions:
    """Settings of reward model training."""

    lr: float = 1e-5
    """Peak learning rate of AdamW, with warm-up over 3% of the steps and cosine decay to 0."""
    weight_decay: float = 0.0
    epochs: int = 1
    batch_size: int = 64
    """Pairs per optimizer step."""
    micro_batch_size: int = 8
    """Pairs per forward and backward pass; affects only memory and speed."""
    max_length: int | None = None
    """Maximum tokens of prompt and response; None: the model's maximum."""
    held_out: float = 0.1
    """Share of the prompts that is held out to measure accuracy."""
    seed: int = 1
    device: str = "auto"
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass, to save memory."""


def build_reward_training(
    model: str,
    files: Sequence[str],
    options: RewardTrainingOptions,
    trained: Path | None = None,
    template_date: str | None = None,
) -> Pretraining:
    """Build a reward model, from a causal LM or a saved sequence classifier, and its training pairs.

    Args:
        model: the model to start from, which also provides the tokenizer.
        files: files of pairs.
        options: settings of the training.
        trained: checkpoint of this training to resume from.
        template_date: date in the chat template, as YYYY-MM-DD; None: today's.

    Raises:
        ValueError: files contain no pairs, the model cannot be trained, or options are invalid.
    """
    _check(options)
    device = resolve_device(options.device, "--device")
    path = resolve_model_path(model, cache_dir())
    learned, held_out = split_pairs(load_pairs(files), options.held_out, options.seed)  # before loading a model
    tokenizer = load_tokenizer(path)
    seed_rng(options.seed)
    classifier = new_reward_model(trained or path, dtype=torch.float32)
    config = classifier.config
    check_vocabulary(f"--model={model}", config, tokenizer, "its tokenizer")  # as runs with this reward model check it
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    length = _length(options.max_length, getattr(config.get_text_config(), "max_position_embeddings", None))
    template = dated_template(tokenizer, None, template_date)
    learned_batch, held_out_batch = (
        preference_batch(pairs, tokenizer, config.pad_token_id, length, template) for pairs in (learned, held_out)
    )
    if options.gradient_checkpointing:
        enable_gradient_checkpointing(classifier)
    steps = options.epochs * math.ceil(len(learned) / options.batch_size)
    optimizer = OptimizerOptions(
        lr=options.lr,
        weight_decay=options.weight_decay,
        schedule="cosine",
        warmup_steps=int(0.03 * steps),
        total_steps=steps,
    )
    engine: LocalEngine[PairOutputs] = LocalEngine(
        on_device(classifier, device),
        MicroBatching(options.micro_batch_size, key="--micro-batch-size"),
        optimizer,
        compute_dtype=DTYPES[number_format("auto", device)],
        save=partial(save_model, tokenizer),
    )
    plan = UpdatePlan(options.batch_size, options.epochs, seed=options.seed)
    learner = Learner(engine, PairForward(), LossSpec(PairForward(), PreferenceLoss()), plan)
    return Pretraining(learner, learned_batch, held_out_batch, plan, preference_accuracy, role="rm")


def _check(options: RewardTrainingOptions) -> None:
    for name, value in (("--lr", options.lr), ("--weight-decay", options.weight_decay)):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value:g}: is no finite number")
    if not 0 < options.held_out < 1:
        raise ValueError(f"--held-out={options.held_out:g}: accuracy is measured on some of the prompts; give a share")


def _length(configured: int | None, positions: int | None) -> int:
    if configured is not None and positions is not None and configured > positions:
        raise ValueError(f"--max-length={configured}: the model has {positions} positions (max_position_embeddings)")
    return configured or positions or sys.maxsize
