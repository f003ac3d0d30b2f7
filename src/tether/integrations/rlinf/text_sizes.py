"""Conversions of sizes in text runs: prompts and responses per step, tokens per response, rows of a file."""

from __future__ import annotations

from typing import Any

from tether.integrations.rlinf.rows import UNSET, NotRead, Unsupported, Values, positive_int


def prompts_per_step(value: object, values: Values) -> object:
    """Return the prompts of a training batch: `rollout_epoch` rollouts of `rollout_batch_size` prompts."""
    prompts = positive_int(values, "data.rollout_batch_size", None)
    return UNSET if prompts is None else prompts * positive_int(values, "algorithm.rollout_epoch", 1)


def mini_batch(value: object, values: Values) -> object:
    """Return the prompts per optimizer step, from the size of a rollout, or else from `global_batch_size` responses."""
    group, prompts = (
        positive_int(values, "algorithm.group_size", 1),
        positive_int(values, "data.rollout_batch_size", None),
    )
    if prompts is None:
        rows = positive_int(values, "actor.global_batch_size", None)
        if rows is None:
            return UNSET
    else:
        rows = prompts * group // positive_int(values, "algorithm.n_minibatches", 1)
    if rows % group:
        raise Unsupported(f"{rows} responses an optimizer step are no whole number of groups of {group}")
    return rows // group


def responses(value: object, values: Values) -> object:
    """Return the prompts per optimizer step from `global_batch_size`, which RLinf ignores if a rollout has a size."""
    if values.get("data.rollout_batch_size") is not None:
        raise NotRead("follows from data.rollout_batch_size, group_size and n_minibatches")
    return mini_batch(value, values)


def micro_batch(value: object, values: Values) -> object:
    """Return the responses per forward pass."""
    if values.get("algorithm.training_batch_size_per_gpu") is not None:
        raise NotRead("RLinf reads algorithm.training_batch_size_per_gpu in its place")
    return value


def response_length(value: object, values: Values) -> object:
    """Return the maximum response length: the configured limit, or the sequence length minus the maximum prompt
    length."""
    limit = positive_int(values, "algorithm.sampling_params.max_new_tokens", None)
    total, prompt = (
        positive_int(values, "runner.seq_length", None),
        positive_int(values, "data.max_prompt_length", None),
    )
    if limit is not None or total is None or prompt is None:
        return UNSET if limit is None else limit
    if total <= prompt:
        raise Unsupported(f"it leaves no token to the response beside data.max_prompt_length={prompt}")
    return total - prompt


def first_rows(value: Any, values: Values) -> object:
    """Return the maximum number of rows of a file; UNSET for a negative number, which means all."""
    return UNSET if value is None or value < 0 else value
