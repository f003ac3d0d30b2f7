"""Training from Python: `tether train` with Python objects as values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tether.commands.result import TrainingResult
from tether.commands.train import train as train_loaded
from tether.config import LoadedConfig, Override, load_config
from tether.loop.parts import Callbacks
from tether.runtime.machine import release_memory
from tether.runtime.objects import PREFIX, register_objects
from tether.text.input_checks import missing_inputs

Settings = Mapping[str, object]
"""Keys of the configuration, dotted or nested -> values."""
KEYS = {
    "dataset": "data.train_files",
    "val_dataset": "data.val_files",
    "reward": "custom_reward_function.path",
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "env": "env.train.id",
    "policy": "policy.model_type",
}
"""Argument of `train` -> key that it replaces."""
ROWS = ("dataset", "val_dataset")
_one_run = threading.Lock()


def train(
    config: Path | str | Settings | None = None,
    overrides: Settings | Sequence[str] = (),
    *,
    callbacks: Sequence[object] = (),
    dataset: object = None,
    val_dataset: object = None,
    reward: Callable[..., object] | str | None = None,
    model: object = None,
    tokenizer: object = None,
    env: Callable[..., object] | str | None = None,
    policy: object = None,
) -> TrainingResult:
    """Train like `tether train`: an existing run in the same folder resumes, and a signal stops it after a step.

    An argument that replaces a key can also be a string, such as an id or a path, which becomes the value of that key.

    Args:
        config: a YAML file, or its content as a mapping; None: there are only overrides.
        overrides: overrides of the configuration: a mapping (``{"trainer.total_epochs": 2}``), or strings as on the
            command line (``["trainer.total_epochs=2"]``).
        callbacks: objects with any of ``on_step_end(step, metrics)``, ``on_evaluation(step, metrics)`` and
            ``on_checkpoint(step, path)``. An exception in one ends the run, after a checkpoint of the completed step.
        dataset: rows instead of ``data.train_files``: a sequence of mappings in the same layout, a DataFrame, or a
            sequence of `tether.batch.Prompt`.
        val_dataset: rows instead of ``data.val_files``.
        reward: a function instead of ``custom_reward_function.path``, with the same arguments; it runs in this process.
        model: a `transformers.PreTrainedModel` instead of ``actor_rollout_ref.model.path``; a copy is trained.
        tokenizer: a tokenizer instead of ``actor_rollout_ref.model.tokenizer_path``; required with a model.
        env: a class or function instead of ``env.train.id``, which returns a new `gymnasium.Env` at each call; with an
            argument ``num_envs`` returns a `gymnasium.vector.VectorEnv`.
        policy: a `torch.nn.Module` instead of ``policy.model_type``, or its class; a copy is trained.

    Raises:
        ValueError: another run is active in this process, or a callback, an object, the configuration, its inputs, or
            the checkpoint to resume from is unusable.
    """
    checked_callbacks = Callbacks(callbacks)
    arguments = {
        "dataset": dataset,
        "val_dataset": val_dataset,
        "reward": reward,
        "model": model,
        "tokenizer": tokenizer,
        "env": env,
        "policy": policy,
    }
    texts = {KEYS[name]: value for name, value in arguments.items() if isinstance(value, str | Path)}
    objects = {name: value for name, value in arguments.items() if value is not None and KEYS[name] not in texts}
    if "model" in objects and tokenizer is None:
        raise ValueError("model: give its tokenizer, too, as tokenizer=...")
    if not _one_run.acquire(blocking=False):
        raise ValueError(
            "a run is training in this process already, and runs in one process would share random numbers, signals, "
            "threads and objects: start this one when that is done, or in a separate process (optuna: n_jobs=1 in each "
            "of several processes)."
        )
    try:
        with register_objects(objects):
            return train_loaded(_load(config, overrides, objects, texts), checked_callbacks)
    finally:
        _one_run.release()
        release_memory()


def _load(
    config: Path | str | Settings | None, overrides: Settings | Sequence[str], objects: Settings, texts: Settings
) -> LoadedConfig:
    if isinstance(overrides, str):
        raise ValueError(f"overrides={overrides!r}: give a mapping of keys, or a list of texts KEY=VALUE")
    if config is not None and not isinstance(config, Mapping | str | Path):
        raise ValueError(f"config is a {type(config).__name__}; give a YAML file or a mapping of keys")
    path = Path(config).expanduser() if isinstance(config, str | Path) else None
    explicit = [*(_as_overrides(config) if isinstance(config, Mapping) else ())]
    explicit += _as_overrides(overrides) if isinstance(overrides, Mapping) else overrides
    references: dict[str, object] = {KEYS[name]: [PREFIX + name] if name in ROWS else PREFIX + name for name in objects}
    return load_config(path, [*explicit, *_as_overrides(references | dict(texts))], missing_inputs)


def _as_overrides(settings: Settings) -> Iterator[Override | str]:
    for key, value in settings.items():
        yield Override(str(key), _plain(value), delete=False)


def _plain(value: object) -> object:
    """Convert a value to types that YAML supports."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
