"""Repetition of an update or inference that does not fit into memory in smaller micro-batches, with the same result."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Limit = TypeVar("Limit")
Result = TypeVar("Result")
CPU_ALLOCATOR = "can't allocate memory"
"""Part of the message of the RuntimeError that torch raises if an allocation on a CPU fails."""
LOWER = (
    "Take a smaller model or a larger machine; or lower, for text, actor_rollout_ref.rollout.max_num_seqs, "
    "data.max_response_length or data.max_prompt_length, and in simulators env.train.total_num_envs, "
    "env.train.max_steps_per_rollout_epoch or policy.hidden_dim."
)


class OutOfMemory(ValueError):
    """An allocation failed; the message has the place and what to change."""


class MicroBatchTooLarge(OutOfMemory):
    """A micro-batch did not fit into the memory of one of several ranks.

    The other ranks wait for it within a layer, so it cannot be repeated right away. It may fit with the setting
    `instead`, a key and its value.
    """

    def __init__(self, message: str, instead: tuple[str, int] = ("", 0)) -> None:
        super().__init__(message)
        self.instead = instead


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the CPU."""
    failed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return failed or (isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error))


def out_of_memory_message(error: BaseException, where: str | None = None, advice: str = LOWER) -> str | None:
    """Return the message to the user about a failed allocation, or None if `error` is another one.

    Args:
        error: the error, with its traceback.
        where: the place that ran out of memory; by default the last line of tether in the traceback.
        advice: what to change.
    """
    if not is_out_of_memory(error):
        return None
    if where is None:
        package = Path(__file__).parents[1]
        frames = traceback.extract_tb(error.__traceback__)
        frame = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(package))
        where = f"{frame.filename}, line {frame.lineno}"
    return f"out of memory in {where} ({_reason(error)}). {advice}"


@contextmanager
def named_out_of_memory(where: str | None = None, advice: str = LOWER) -> Iterator[None]:
    """Name the place and the advice in an out-of-memory error; the arguments are those of `out_of_memory_message`.

    Raises:
        OutOfMemory: an allocation failed within the context.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory_message(error, where, advice)
        if message is None:
            raise
        raise OutOfMemory(message) from None


def within_memory(
    attempt: Callable[[Limit], Result],
    limit: Limit,
    halved: Callable[[Limit], Limit | None],
    setting: Callable[[Limit], str],
    advice: str,
) -> tuple[Result, Limit]:
    """Run an attempt with smaller and smaller micro-batches until it fits.

    Args:
        attempt: the work; it must overwrite whatever a failed attempt leaves.
        limit: the limit of a micro-batch.
        halved: returns the next smaller limit, or None if a micro-batch is a single row already.
        setting: returns a limit as a setting of the configuration, for the warning.
        advice: what to change if a single row does not fit.

    Returns:
        The result, and the limit that it needed.

    Raises:
        ValueError: a single row does not fit.
    """
    first = limit
    while True:
        try:
            result = attempt(limit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = _reason(error)
        else:
            if limit != first:
                logger.warning(
                    "a micro-batch did not fit into memory; it was split, with the same result, and so will be the "
                    "next ones. To make this permanent: %s",
                    setting(limit),
                )
            return result, limit
        # Only here, since the except block keeps the error and the tensors in its traceback alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller = halved(limit)
        if smaller is None:
            raise ValueError(f"out of memory with a micro-batch of a single row ({reason}). {advice}")
        limit = smaller


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
