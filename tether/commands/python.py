"""Training from Python: what `tether train` does, with values in place of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.assembly.named_inputs import missing_inputs
from tether.commands.result import TrainingResult
from tether.commands.train import train as train_loaded
from tether.config import LoadedConfig, Override, load_config
from tether.trainer.callbacks import Callbacks

Settings = Mapping[str, Any]
"""Keys of the configuration, dotted or nested -> values."""


def train(
    config: Path | str | Settings | None = None,
    overrides: Settings | Sequence[str] = (),
    *,
    callbacks: Sequence[object] = (),
) -> TrainingResult:
    """Train, as `tether train` does: a run that was begun in its folder goes on; a signal stops it after a step.

    Args:
        config: a YAML file, or its content as a mapping; None: the overrides are all of it.
        overrides: over it: a mapping (``{"trainer.total_epochs": 2}``), or texts as on the command line
            (``["trainer.total_epochs=2"]``).
        callbacks: objects with any of ``on_step_end(step, metrics)``, ``on_evaluation(step, metrics)`` and
            ``on_checkpoint(step, path)``. What one raises ends the run, after a checkpoint of the step that is done.

    Raises:
        ValueError: a callback that is none; everything that is wrong with the configuration, its inputs, or the
            checkpoint to resume from.
    """
    told = Callbacks(callbacks)
    return train_loaded(_load(config, overrides), told)


def _load(config: Path | str | Settings | None, overrides: Settings | Sequence[str]) -> LoadedConfig:
    if isinstance(overrides, str):
        raise ValueError(f"overrides={overrides!r}: give a mapping of keys, or a list of texts KEY=VALUE")
    if config is not None and not isinstance(config, Mapping | str | Path):
        raise ValueError(f"config is a {type(config).__name__}; give a YAML file or a mapping of keys")
    path = Path(config).expanduser() if isinstance(config, str | Path) else None
    given = [*(_as_overrides(config) if isinstance(config, Mapping) else ())]
    given += _as_overrides(overrides) if isinstance(overrides, Mapping) else overrides
    return load_config(path, given, missing_inputs)


def _as_overrides(settings: Settings) -> Iterator[Override | str]:
    for key, value in settings.items():
        yield Override(str(key), _plain(value), delete=False)


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
