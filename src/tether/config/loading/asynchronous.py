"""Translation of verl's settings of asynchronous training to `trainer.async_mode` and related keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tether.config.keys import keys, show
from tether.config.problems import Problem

if TYPE_CHECKING:
    from tether.config.loading.settings import Setting, Settings

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
"""Defaults of verl's fully_async_ppo_trainer."""
SAMPLES = "rollout.total_rollout_steps"
WARMUP_BATCHES, MAX_OFF_POLICY = "num_warmup_batches", "trainer.v1.sampler.max_off_policy_threshold"


def translate_asynchronous(settings: Settings) -> tuple[list[Problem], list[str]]:
    """Set tether's keys from verl's, except those that the user set.

    Returns:
        Problems with values, and notes on the keys that were set.
    """
    fully_async_keys = [key for key in settings if key == FULLY_ASYNC or key in DEFAULTS]
    trainer = settings.get(TRAINER)
    if fully_async_keys:
        numbers, problems = _numbers(settings, [*DEFAULTS, SAMPLES])
        origin, derived = fully_async_keys[0], {} if problems else _fully_async_settings(settings, DEFAULTS | numbers)
    elif trainer is not None and trainer.value not in (None, "sync"):
        numbers, problems = _numbers(settings, [f"trainer.v1.{trainer.value}.{WARMUP_BATCHES}", MAX_OFF_POLICY])
        origin, derived = TRAINER, {} if problems else _trainer_mode_settings(trainer, numbers)
        if trainer.value not in ("colocate_async", "separate_async"):
            fix = "use one of sync, colocate_async, separate_async"
            return [Problem(TRAINER, f"{show(trainer.value)} is refused: verl has no such trainer", fix)], []
    else:
        return [], []
    origin_setting, new = settings[origin], {key: value for key, value in derived.items() if _is_unset(settings, key)}
    for key, value in new.items():
        settings[key] = replace(
            origin_setting, value=value, source=f"{origin_setting.source}, as {origin}", written=origin
        )
    shown = ", ".join(f"{key}={show(value)}" for key, value in new.items())
    return problems, [f"verl's {origin} and related keys set {shown}"] if new else []


def _numbers(settings: Settings, names: list[str]) -> tuple[dict[str, float], list[Problem]]:
    """Return the numeric settings of these keys, and a problem for each value that is not a number."""
    values = {name: settings[name].value for name in names if name in settings and settings[name].value is not None}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and value >= 0}
    return numbers, [
        Problem(name, f"{show(value)} is refused: it is not a number, 0 or above", "give a number")
        for name, value in values.items()
        if name not in numbers
    ]


def _fully_async_settings(settings: Settings, numbers: Mapping[str, float]) -> dict[str, object]:
    staleness, updates, batches, partial = (numbers[key] for key in DEFAULTS)
    mini = settings[MINI_BATCH].value if MINI_BATCH in settings else keys()[MINI_BATCH].default
    derived: dict[str, object] = {MODE: "fully_async" if staleness else "off", BYPASS: True}
    if staleness:
        derived |= {STALENESS: max(math.ceil(staleness), 1), PARTIAL: bool(partial)}
    if isinstance(mini, int):
        # In verl the sampler gets new weights after this many prompts; in tether that is one training step.
        derived[BATCH] = batch = max(int(mini * batches * updates), 1)
        if SAMPLES in numbers:
            derived[STEPS] = max(math.ceil(numbers[SAMPLES] / batch), 1)
    return derived


def _trainer_mode_settings(trainer: Setting, numbers: Mapping[str, float]) -> dict[str, object]:
    warmup_batches, max_off_policy = (
        numbers.get(f"trainer.v1.{trainer.value}.{WARMUP_BATCHES}", 1),
        numbers.get(MAX_OFF_POLICY, 8),
    )
    return {MODE: "fully_async", STALENESS: max(int(min(warmup_batches, max_off_policy - 1)), 1), PARTIAL: True}


def _is_unset(settings: Settings, key: str) -> bool:
    """Whether the user left a key unset; verl's 0 prompts per step also counts as unset."""
    return key not in settings or settings[key].value is None or (key == BATCH and settings[key].value == 0)
