"""`data`: prompts, their order and their length limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tether.config.schema.section import (
    ActsIf,
    Day,
    Inherits,
    Limit,
    NullIsUnset,
    Options,
    Positive,
    Section,
    Seed,
    Strings,
)


class CustomClassConfig(Section):
    """`data.custom_cls`: a user's dataset class."""

    path: str | None = None
    """Python file that defines it."""
    name: str | None = None
    """Name of the class in that file."""


class SftConfig(Section):
    """`sft`: supervised fine-tuning in place of PPO."""

    enable: bool = False
    """Train on the assistant messages of the rows, without sampling; `tether sft` sets this. (tether's own key.)"""


FINE_TUNING = ActsIf("sft.enable", on=(True,))


class DataConfig(Section):
    """Prompts: files, order, lengths, chat template."""

    train_files: Strings = Field(examples=["data/gsm8k/train.parquet"])
    """Training prompts, concatenated: parquet, json, jsonl, patterns, folders, hub ids, reasoning_gym:TASK?key=n."""
    val_files: Annotated[Strings, NullIsUnset()] = ()
    """Validation prompts, in the same forms; empty: no validation."""
    train_batch_size: Positive = 1024
    """Prompts per training step; each is sampled rollout.n times."""
    max_prompt_length: Positive = 512
    """Maximum length of a prompt in tokens, including the chat template."""
    max_response_length: Positive = 512
    """Maximum length of a response in tokens; longer ones are truncated."""
    filter_overlong_prompts: bool = False
    """Drop rows longer than max_prompt_length (`tether sft`: max_length); the number of dropped rows is reported."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt (`tether sft`: conversation) that is too long: refuse it, or remove this part of it."""
    shuffle: bool = True
    """Draw training prompts in a new random order in each epoch."""
    seed: Annotated[Seed, Inherits("trainer.seed")]
    """Seed of that order."""
    train_max_samples: Limit = -1
    """Number of training rows to use: a random subset with shuffle, otherwise the first ones; -1: all."""
    val_max_samples: Limit = -1
    """Number of validation rows to use; -1: all."""
    prompt_key: str = "prompt"
    """Column with the conversation."""
    messages_key: Annotated[str, FINE_TUNING] = "messages"
    """Column with entire conversations, for `tether sft`; files without it have prompt_key and response_key."""
    response_key: Annotated[str, FINE_TUNING] = "response"
    """Column with the response to prompt_key, for `tether sft`."""
    max_length: Annotated[Positive, FINE_TUNING] = 1024
    """Maximum length of a conversation in tokens, for `tether sft`."""
    reward_fn_key: str = "data_source"
    """Column that selects the reward."""
    answer_key: str | None = None
    """Column with the right answer, in files with RLinf's layout; null: reward_model.ground_truth. (RLinf's key.)"""
    data_source: str | None = None
    """data_source of rows that have none; null: every row must have one. (tether's own key.)"""
    chat_template: str | None = None
    """Jinja chat template, as text, that replaces the tokenizer's. (tether's own key.)"""
    chat_template_date: Day | None = None
    """Date that the chat template uses as today's; null: the date of the run's first start. (tether's own key.)"""
    apply_chat_template_kwargs: Options
    """Variables for the chat template, for example {enable_thinking: false}."""
    control_tokens_as_text: bool = False
    """Read control tokens in messages, such as <|im_end|>, as plain text; off: they take effect. (tether's own key.)"""
    trust_remote_code: bool = False
    """Allow the tokenizer's repository to run its code."""
    custom_cls: CustomClassConfig
    val_batch_size: Positive | None = None
    """Number of validation prompts that are sampled and scored together; null: all."""
    gen_batch_size: Annotated[
        Positive, Inherits(".train_batch_size"), ActsIf("algorithm.filter_groups.enable", on=(True,))
    ]
    """Number of prompts that dynamic sampling (algorithm.filter_groups) samples at a time."""
