"""Starts or resumes a text run: seeds, device, lock of its folder, checkpoint and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from tether.checkpoints import CheckpointStore
from tether.config import LoadedConfig
from tether.loop.run import find_start, with_rollback_learning_rate
from tether.runtime.global_rng import seed_rng
from tether.runtime.machine import resolve_device, set_threads
from tether.runtime.run_lock import RunLock
from tether.text.inputs import with_template_date
from tether.text.loading import decided_formats


@dataclass(frozen=True)
class Start:
    """The checkpoint, device and dtypes that a run starts with."""

    loaded: LoadedConfig
    """The configuration with all automatic values resolved."""
    device: torch.device
    store: CheckpointStore
    checkpoint: Path | None
    """The checkpoint to resume from; None for a new run."""
    formats: Mapping[str, str]
    """Keys that were ``auto``, with the dtypes chosen for them."""


def start_run(loaded: LoadedConfig, resources: ExitStack) -> Start:
    """Lock the folder of a run until `resources` closes, and prepare to start or resume in it.

    Raises:
        ValueError: another run uses the folder, or its checkpoint is damaged or was made with different model settings.
    """
    trainer = loaded.config.trainer
    set_threads(trainer.num_threads)
    seed_rng(trainer.seed)
    device = resolve_device(trainer.device)
    if is_progress_bar_enabled():  # transformers' progress bars would appear at every checkpoint
        disable_progress_bar()
        resources.callback(enable_progress_bar)
    resources.enter_context(RunLock(Path(trainer.default_local_dir)))
    store, checkpoint = find_start(loaded)
    loaded = with_template_date(with_rollback_learning_rate(loaded, store, checkpoint), checkpoint)
    formats = decided_formats(loaded.config, device, checkpoint)
    return Start(loaded.with_values(formats, "what this device computes in"), device, store, checkpoint, formats)
