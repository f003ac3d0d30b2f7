"""`data`: which prompts, in which order, how long."""

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
    """`data.custom_cls`: a dataset class of your own."""

    path: str | None = None
    """Python file that defines it."""
    name: str | None = None
    """Name of the class in that file."""


class SftConfig(Section):
    """`sft`: supervised fine-tuning in place of PPO."""

    enable: bool = False
    """Learn the assistant's messages in the rows, without sampling; `tether sft` sets it. (tether's own key.)"""


FINE_TUNING = ActsIf("sft.enable", on=(True,))


class DataConfig(Section):
    """Prompts: files, order, lengths, chat template."""

    train_files: Strings = Field(examples=["data/gsm8k/train.parquet"])
    """Training prompts, joined: files (parquet, json, jsonl), patterns, folders, hub ids, reasoning_gym:TASK?key=n."""
    val_files: Annotated[Strings, NullIsUnset()] = ()
    """Held-out prompts, in the same forms; none: nothing is validated."""
    train_batch_size: Positive = 1024
    """Prompts a training step; each is sampled rollout.n times."""
    max_prompt_length: Positive = 512
    """Longest prompt in tokens, after the chat template."""
    max_response_length: Positive = 512
    """Longest response in tokens; one that reaches it is cut."""
    filter_overlong_prompts: bool = False
    """Drop rows longer than max_prompt_length (`tether sft`: max_length); the number dropped is shown."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """An overlong prompt (`tether sft`: conversation): refuse it, or cut its left end, its right end, or its middle."""
    shuffle: bool = True
    """Draw training prompts in a new random order each epoch."""
    seed: Annotated[Seed, Inherits("trainer.seed")]
    """Seed of that order."""
    train_max_samples: Limit = -1
    """Use this many training rows: a random subset with shuffle, else the first."""
    val_max_samples: Limit = -1
    """Use this many held-out rows."""
    prompt_key: str = "prompt"
    """Column with the conversation."""
    messages_key: Annotated[str, FINE_TUNING] = "messages"
    """Column with whole conversations, in `tether sft`; files without it have prompt_key and response_key."""
    response_key: Annotated[str, FINE_TUNING] = "response"
    """Column with the response to prompt_key, in `tether sft`."""
    max_length: Annotated[Positive, FINE_TUNING] = 1024
    """Longest conversation in tokens, in `tether sft`."""
    reward_fn_key: str = "data_source"
    """Column that names the reward."""
    answer_key: str | None = None
    """Column with the right answer, in files of RLinf's layout; null: reward_model.ground_truth. (RLinf's key.)"""
    data_source: str | None = None
    """data_source of rows that have none; null: every row must name its own. (tether's own key.)"""
    chat_template: str | None = None
    """Jinja chat template, as text, instead of the tokenizer's own. (tether's own key.)"""
    chat_template_date: Day | None = None
    """Date that the chat template writes as today's; null: that of the run's first start. (tether's own key.)"""
    apply_chat_template_kwargs: Options
    """Passed to the chat template, for example {enable_thinking: false}."""
    control_tokens_as_text: bool = False
    """Read control tokens inside messages, such as <|im_end|>, as plain text; else they act. (tether's own key.)"""
    trust_remote_code: bool = False
    """Let the tokenizer's repository run its own code."""
    custom_cls: CustomClassConfig
    val_batch_size: Positive | None = None
    """Held-out prompts that are sampled and scored together; null: all."""
    gen_batch_size: Annotated[
        Positive, Inherits(".train_batch_size"), ActsIf("algorithm.filter_groups.enable", on=(True,))
    ]
    """Prompts that dynamic sampling (algorithm.filter_groups) samples at a time."""
