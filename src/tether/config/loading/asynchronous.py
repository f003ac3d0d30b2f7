"""verl's settings of asynchronous training, which become `trainer.async_mode` and what goes with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tether.config.keys import keys, show
from tether.config.problems import Problem

if TYPE_CHECKING:
    from tether.config.loading.given import Given, Setting

MODE = "trainer.async_mode"
STALENESS, PARTIAL = "actor_rollout_ref.rollout.max_staleness", "actor_rollout_ref.rollout.partial_rollout"
BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
STEPS = "trainer.total_training_steps"
BYPASS = "algorithm.rollout_correction.bypass_mode"
TRAINER = "trainer.v1.trainer_mode"
FULLY_ASYNC = "async_training"
DEFAULTS: dict[str, float] = {
    f"{FULLY_ASYNC}.staleness_threshold": 0.1,
    f"{FULLY_ASYNC}.trigger_parameter_sync_step": 4,
    f"{FULLY_ASYNC}.require_batches": 1,
    f"{FULLY_ASYNC}.partial_rollout": True,
}
"""Those of verl's fully_async_ppo_trainer."""
SAMPLES = "rollout.total_rollout_steps"
AHEAD, SPAN = "num_warmup_batches", "trainer.v1.sampler.max_off_policy_threshold"


def translate_asynchronous(given: Given) -> tuple[list[Problem], list[str]]:
    """Set tether's keys as verl's ask for, but for those that the user set.

    Returns:
        Problems with values, and a note on the keys that were set.
    """
    fully = [key for key in given if key == FULLY_ASYNC or key in DEFAULTS]
    trainer = given.get(TRAINER)
    if fully:
        numbers, problems = _numbers(given, [*DEFAULTS, SAMPLES])
        origin, derived = fully[0], {} if problems else _of_fully_async(given, DEFAULTS | numbers)
    elif trainer is not None and trainer.value not in (None, "sync"):
        numbers, problems = _numbers(given, [f"trainer.v1.{trainer.value}.{AHEAD}", SPAN])
        origin, derived = TRAINER, {} if problems else _of_trainer_mode(trainer, numbers)
        if trainer.value not in ("colocate_async", "separate_async"):
            fix = "use one of sync, colocate_async, separate_async"
            return [Problem(TRAINER, f"{show(trainer.value)} is refused: verl has no such trainer", fix)], []
    else:
        return [], []
    source, new = given[origin], {key: value for key, value in derived.items() if _is_open(given, key)}
    for key, value in new.items():
        given[key] = replace(source, value=value, source=f"{source.source}, as {origin}", written=origin)
    shown = ", ".join(f"{key}={show(value)}" for key, value in new.items())
    return problems, [f"verl's {origin} and what goes with it set {shown}"] if new else []


def _numbers(given: Given, names: list[str]) -> tuple[dict[str, float], list[Problem]]:
    """Return the settings among these keys, and a problem for each that is no number."""
    values = {name: given[name].value for name in names if name in given and given[name].value is not None}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and value >= 0}
    return numbers, [
        Problem(name, f"{show(value)} is refused: it is not a number, 0 or above", "give a number")
        for name, value in values.items()
        if name not in numbers
    ]


def _of_fully_async(given: Given, numbers: Mapping[str, float]) -> dict[str, object]:
    staleness, updates, batches, partial = (numbers[key] for key in DEFAULTS)
    mini = given[MINI_BATCH].value if MINI_BATCH in given else keys()[MINI_BATCH].default
    derived: dict[str, object] = {MODE: "fully_async" if staleness else "off", BYPASS: True}
    if staleness:
        derived |= {STALENESS: max(math.ceil(staleness), 1), PARTIAL: bool(partial)}
    if isinstance(mini, int):
        # The weights go to the sampler after this many prompts: a step here.
        derived[BATCH] = batch = max(int(mini * batches * updates), 1)
        if SAMPLES in numbers:
            derived[STEPS] = max(math.ceil(numbers[SAMPLES] / batch), 1)
    return derived


def _of_trainer_mode(trainer: Setting, numbers: Mapping[str, float]) -> dict[str, object]:
    ahead, span = numbers.get(f"trainer.v1.{trainer.value}.{AHEAD}", 1), numbers.get(SPAN, 8)
    return {MODE: "fully_async", STALENESS: max(int(min(ahead, span - 1)), 1), PARTIAL: True}


def _is_open(given: Given, key: str) -> bool:
    """Whether the user did not set a key. verl's 0 prompts a step is not a setting either."""
    return key not in given or given[key].value is None or (key == BATCH and given[key].value == 0)
