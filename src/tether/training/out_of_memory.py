"""An update or inference that does not fit into memory is repeated in smaller micro-batches, with the same result."""

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
"""In the text of the RuntimeError that torch raises where an allocation on a CPU fails."""
LOWER = (
    "Take a smaller model or a larger machine; or lower, for text, actor_rollout_ref.rollout.max_num_seqs, "
    "data.max_response_length or data.max_prompt_length, and in simulators env.train.total_num_envs, "
    "env.train.max_steps_per_rollout_epoch or policy.hidden_dim."
)


class OutOfMemory(ValueError):
    """An allocation failed; says where, and what to change."""


class MicroBatchTooLarge(OutOfMemory):
    """A micro-batch did not fit into the memory of one of several ranks, whose others wait for it inside of a layer and
    could not follow a second attempt. With `instead`, a key and its value, it may fit.
    """

    def __init__(self, message: str, instead: tuple[str, int] = ("", 0)) -> None:
        super().__init__(message)
        self.instead = instead


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the CPU."""
    failed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return failed or (isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error))


def out_of_memory_message(error: BaseException, where: str | None = None, advice: str = LOWER) -> str | None:
    """The message to the user about a failed allocation; None: `error` is another one.

    Args:
        error: with its traceback.
        where: memory ran out; None: the last line of tether's that the error passed.
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
    """Around what cannot be repeated in smaller parts; for the arguments see `out_of_memory_message`.

    Raises:
        OutOfMemory: an allocation failed inside.
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
    """Try, with smaller and smaller micro-batches, until it fits.

    Args:
        attempt: the work; a failed one must leave nothing that the next does not undo.
        limit: of a micro-batch.
        halved: the next smaller limit; None where a micro-batch is a single row already.
        setting: a limit as it stands in the configuration, for the warning.
        advice: what to change where a single row does not fit.

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
        # Here, after the error and the tensors in its traceback are gone.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller = halved(limit)
        if smaller is None:
            raise ValueError(f"out of memory with a micro-batch of a single row ({reason}). {advice}")
        limit = smaller


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
