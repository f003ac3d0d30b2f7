"""Which settings differ between two configurations, for example of a run and of the checkpoint that it resumes from."""

from __future__ import annotations

from pathlib import Path

from tether.config.keys import show, values_of
from tether.config.loading.load import LoadedConfig, load_config
from tether.config.problems import ConfigError

RESUMING = ("trainer.resume_mode", "trainer.resume_from_path")
"""Say how a run is resumed, not what it does."""


def saved_values(saved: Path) -> dict[str, object] | None:
    """The flat table of a ``run.yaml``; None where a version with other keys wrote it."""
    try:
        return values_of(load_config(saved, []).config)
    except ConfigError:
        return None


def changes_since(saved: Path, now: LoadedConfig) -> list[str]:
    """List ``key: value then -> value now`` for every setting that is not what the file says.

    Args:
        saved: the ``run.yaml`` of a checkpoint.
        now: the configuration of the run that resumes.
    """
    then = saved_values(saved)
    if then is None:
        return [f"{saved} was written by a version with other keys, so its settings cannot be compared"]
    values = values_of(now.config)
    different = [key for key in values if values[key] != then.get(key) and key not in RESUMING]
    return [f"{key}: {show(then.get(key))} -> {show(values[key])}" for key in different]
