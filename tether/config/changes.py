"""Which settings differ between two configurations, for example of a run and of the checkpoint that it resumes from."""

from __future__ import annotations

from pathlib import Path

from tether.config.keys import show, values_of
from tether.config.loading.load import LoadedConfig, load_config
from tether.config.problems import ConfigError

RESUMING = ("trainer.resume_mode", "trainer.resume_from_path")
"""Say how a run is resumed, not what it does."""

DRAW = ("data.", "algorithm.", "actor_rollout_ref.rollout.", "reward_model.", "custom_reward_function.",
        "trainer.async_mode", "trainer.seed")  # fmt: skip
"""Begin the keys that decide what a batch is: which prompts, sampled how, scored and chosen by what."""


def saved_values(saved: Path) -> dict[str, object] | None:
    """The flat table of a ``run.yaml``; None where a version with other keys wrote it."""
    try:
        return values_of(load_config(saved, []).config)
    except ConfigError:
        return None


def changes_since(saved: Path, now: LoadedConfig, among: tuple[str, ...] = ("",)) -> list[str]:
    """List ``key: value then -> value now`` for every setting that is not what the file says.

    Args:
        saved: the ``run.yaml`` of a checkpoint.
        now: the configuration of the run that resumes.
        among: how the keys that are compared begin.
    """
    then = saved_values(saved)
    if then is None:
        return [f"{saved} was written by a version with other keys, so its settings cannot be compared"]
    values = values_of(now.config)
    compared = [key for key in values if key.startswith(among) and key not in RESUMING]
    different = [key for key in compared if values[key] != then.get(key)]
    return [f"{key}: {show(then.get(key))} -> {show(values[key])}" for key in different]
