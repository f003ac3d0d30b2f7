"""Training from Python: what `tether train` does, with values in place of text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tether.assembly.named_inputs import missing_inputs
from tether.commands.result import TrainingResult
from tether.commands.train import train as train_loaded
from tether.config import LoadedConfig, Override, load_config
from tether.runtime.machine import give_memory_back
from tether.runtime.objects import PREFIX, holding
from tether.trainer import Callbacks

Settings = Mapping[str, object]
"""Keys of the configuration, dotted or nested -> values."""
STANDS_FOR = {
    "dataset": "data.train_files",
    "val_dataset": "data.val_files",
    "reward": "custom_reward_function.path",
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "env": "env.train.id",
    "policy": "policy.model_type",
}
"""Argument of `train` -> key whose value it takes the place of."""
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
    """Train, as `tether train` does: a run that was begun in its folder resumes; a signal stops it after a step.

    An argument that stands for a key may also be a text, such as an id or a file: the value of that key.

    Args:
        config: a YAML file, or its content as a mapping; None: the overrides are all of it.
        overrides: over it: a mapping (``{"trainer.total_epochs": 2}``), or texts as on the command line
            (``["trainer.total_epochs=2"]``).
        callbacks: objects with any of ``on_step_end(step, metrics)``, ``on_evaluation(step, metrics)`` and
            ``on_checkpoint(step, path)``. What one raises ends the run, after a checkpoint of the step that is done.
        dataset: rows in the place of ``data.train_files``: a sequence of mappings in their layout, a DataFrame, or a
            sequence of `tether.batch.Prompt`.
        val_dataset: the same for ``data.val_files``.
        reward: a function in the place of ``custom_reward_function.path``, called in the same way, but in this process.
        model: a `transformers.PreTrainedModel` in the place of ``actor_rollout_ref.model.path``; a copy is trained.
        tokenizer: in the place of ``actor_rollout_ref.model.tokenizer_path``; a model needs it.
        env: a class or function in the place of ``env.train.id``, which makes a new `gymnasium.Env` at each call.
        policy: a `torch.nn.Module` in the place of ``policy.model_type``, of which a copy is trained; or its class.

    Raises:
        ValueError: another run in this process; a callback or an object that is none; everything that is wrong with the
            configuration, its inputs, or the checkpoint to resume from.
    """
    told = Callbacks(callbacks)
    given = {
        "dataset": dataset,
        "val_dataset": val_dataset,
        "reward": reward,
        "model": model,
        "tokenizer": tokenizer,
        "env": env,
        "policy": policy,
    }
    texts = {STANDS_FOR[name]: one for name, one in given.items() if isinstance(one, str | Path)}
    objects = {name: one for name, one in given.items() if one is not None and STANDS_FOR[name] not in texts}
    if "model" in objects and tokenizer is None:
        raise ValueError("model: give its tokenizer, too, as tokenizer=...")
    if not _one_run.acquire(blocking=False):
        raise ValueError(
            "a run is training in this process already, and random numbers, signals, threads and objects are the "
            "process's: start this one when that is done, or in a process of its own (optuna: n_jobs=1 in each of "
            "several processes)."
        )
    try:
        with holding(objects):
            return train_loaded(_load(config, overrides, objects, texts), told)
    finally:
        _one_run.release()
        give_memory_back()


def _load(
    config: Path | str | Settings | None, overrides: Settings | Sequence[str], objects: Settings, texts: Settings
) -> LoadedConfig:
    if isinstance(overrides, str):
        raise ValueError(f"overrides={overrides!r}: give a mapping of keys, or a list of texts KEY=VALUE")
    if config is not None and not isinstance(config, Mapping | str | Path):
        raise ValueError(f"config is a {type(config).__name__}; give a YAML file or a mapping of keys")
    path = Path(config).expanduser() if isinstance(config, str | Path) else None
    given = [*(_as_overrides(config) if isinstance(config, Mapping) else ())]
    given += _as_overrides(overrides) if isinstance(overrides, Mapping) else overrides
    named: dict[str, object] = {
        STANDS_FOR[name]: [PREFIX + name] if name in ROWS else PREFIX + name for name in objects
    }
    return load_config(path, [*given, *_as_overrides(named | dict(texts))], missing_inputs)


def _as_overrides(settings: Settings) -> Iterator[Override | str]:
    for key, value in settings.items():
        yield Override(str(key), _plain(value), delete=False)


def _plain(value: object) -> object:
    """A value as YAML has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
