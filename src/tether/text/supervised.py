"""Builds supervised fine-tuning: it uses the training loop, engine and checkpoints of PPO, without sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.config import LoadedConfig, RunConfig
from tether.distributed.groups import build_groups
from tether.loop.checkpoint import check_identity, model_fingerprint
from tether.loop.engine import Learner, LossSpec, UpdatePlan
from tether.loop.loop import Schedule, Trainer
from tether.loop.preflight import preflight
from tether.loop.run import Run, begin_run, build_profiler, checkpoint_line, ranks_line
from tether.runtime.cache import cache_dir
from tether.text.data.chats import load_chats
from tether.text.data.config import DataConfig
from tether.text.data.examples import ExampleDataset
from tether.text.data.prompts import PromptOptions, PromptSampler, dated_template
from tether.text.inputs import build_tokenizer, check_vocabulary
from tether.text.learning.build import PolicyEngine
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import Aggregation, LikelihoodLoss, PolicyForward
from tether.text.learning.rollouts import DatasetSource
from tether.text.learning.supervised import ExampleSample, SupervisedRollouts
from tether.text.loading import formats_line
from tether.text.models.model_path import resolve_model_path
from tether.text.models.saved_adapter import check_adapter
from tether.text.roles import build_policy_engine
from tether.text.sources import ModelSpecs
from tether.text.start import start_run


def build_supervised_run(loaded: LoadedConfig, begin: Callable[[str], None] = lambda activity: None) -> Run:
    """Build a supervised fine-tuning run, and resume from a checkpoint according to ``trainer.resume_mode``.

    `begin` is called with a description of each activity when it starts.

    Raises:
        ValueError: the inputs are invalid.
    """
    with ExitStack() as resources:
        start = start_run(loaded, resources)
        loaded, store, checkpoint = start.loaded, start.store, start.checkpoint
        config = loaded.config
        model, data, trainer = config.actor_rollout_ref.model, config.data, config.trainer
        begin("reading the data")
        model_path = resolve_model_path(model.path, cache_dir())
        tokenizer = build_tokenizer(data, model, resolve_model_path(model.tokenizer_path, cache_dir(), weights=False))
        train = build_examples(data, data.train_files, tokenizer, data.train_max_samples, shuffle=data.shuffle)
        held_out = None
        if data.val_files:
            held_out = build_examples(data, data.val_files, tokenizer, data.val_max_samples, shuffle=False)
        if model.lora_adapter_path is not None:
            check_adapter("actor_rollout_ref.model", model, model_path)
        for examples in filter(None, (train, held_out)):
            check_vocabulary(model_path, examples, trust_remote_code=model.trust_remote_code)
        identity = {"data.train_files": train.fingerprint()}
        if isinstance(model_path, Path):
            identity["actor_rollout_ref.model.path"] = model_fingerprint(model_path)
        if checkpoint:
            check_identity(checkpoint, identity)
        begin(f"loading {Path(model_path).name}")
        groups = build_groups(config, start.device, store.root / "ranks", resources)
        schedule = _schedule(config, len(train))
        profiler = build_profiler(trainer, schedule, groups.all_ranks if groups else None)
        incidents, steps = store.root / "incidents", schedule.total_steps
        model_specs = ModelSpecs(model_path, model_path, {}, tokenizer, checkpoint, start.device, steps, incidents)
        learner = _learner(config, build_policy_engine(config, model_specs, groups))
        sampler = PromptSampler(len(train), data.train_batch_size, shuffle=data.shuffle, seed=data.seed)
        fine_tuning = Trainer(
            source=DatasetSource(train, sampler),
            rollouts=SupervisedRollouts(learner, held_out, data.val_batch_size),
            actor=learner,
            critic=None,
            reference=None,
            reward_transforms=(),
            estimate_advantages=lambda batch: {},
            old_log_probs="update",
            profiler=profiler,
            **begin_run(loaded, store, identity, schedule, checkpoint, resources),
        )
        if checkpoint:
            fine_tuning.resume(checkpoint)
        about = [f"training data: {train.report}", *([f"validation data: {held_out.report}"] if held_out else [])]
        about += [ranks_line(config)] if groups else []
        if isinstance(learner.engine, LocalEngine):
            about += checkpoint_line(config, [learner.engine.model])
        about += formats_line(config, start.formats)
        sample = ExampleSample(train[0], tokenizer)
        return Run(
            loaded,
            fine_tuning,
            store.root,
            checkpoint,
            resources.pop_all(),
            tuple(about),
            lambda: preflight(lambda: sample, [learner]),
        )


def build_examples(
    data: DataConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_samples: int, *, shuffle: bool
) -> ExampleDataset:
    """Read `files` and make examples of their rows.

    Raises:
        ValueError: files or rows are invalid, or the chat template does not fit them.
    """
    options = PromptOptions(
        max_prompt_length=data.max_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=max_samples,
        shuffle=shuffle,
        seed=data.seed,
        chat_template=dated_template(tokenizer, data.chat_template, data.chat_template_date),
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    return ExampleDataset(load_chats(data, files), tokenizer, options)


def _learner(config: RunConfig, engine: PolicyEngine) -> Learner:
    """Return the policy's learner, whose update is one optimizer step over all rows of a training step."""
    actor = config.actor_rollout_ref.actor
    forward = PolicyForward(packed=config.actor_rollout_ref.model.use_remove_padding)
    aggregation = Aggregation(actor.loss_agg_mode or "token-mean", actor.loss_scale_factor, config.data.max_length)
    plan = UpdatePlan(config.data.train_batch_size, seed=config.trainer.seed)
    return Learner(engine, forward, LossSpec(forward, LikelihoodLoss(aggregation)), plan)


def _schedule(config: RunConfig, num_examples: int) -> Schedule:
    trainer = config.trainer
    steps_per_epoch = math.ceil(num_examples / config.data.train_batch_size)
    schedule = Schedule.from_config(trainer, trainer.total_training_steps or trainer.total_epochs * steps_per_epoch)
    return replace(schedule, test_freq=trainer.test_freq if trainer.test_freq > 0 else steps_per_epoch)
