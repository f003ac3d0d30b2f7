"""Training, for the command line and for Python: to the last step, or to a signal."""

from __future__ import annotations

from pathlib import Path

from tether.assembly.build import build
from tether.assembly.common import Run
from tether.commands.result import TrainingResult, read_result
from tether.config import LoadedConfig, changes_since
from tether.runtime.interrupt import graceful_interrupt
from tether.runtime.terminal import Screen
from tether.trainer import Callbacks
from tether.training import named_out_of_memory


@named_out_of_memory()
def train(loaded: LoadedConfig, callbacks: Callbacks | None = None) -> TrainingResult:
    """Train what a configuration describes, and tell the callbacks; a run that was begun in its folder resumes.

    Raises:
        ValueError: unusable inputs, a checkpoint of another run, a preflight that refuses, or memory that ran out.
    """
    screen = Screen()
    for note in loaded.notes:
        screen.print(f"note: {note}", style="dim", soft_wrap=True)
    run = build(loaded)
    trainer = run.trainer
    trainer.callbacks = callbacks or Callbacks()
    try:
        for line in run.about:
            screen.print(line, soft_wrap=True)
        if run.resumed_from:
            _show_resumed(screen, run.resumed_from, run.loaded, trainer.step_number, trainer.schedule.total_steps)
        elif loaded.config.trainer.preflight:
            _check_first(run, screen)
        with graceful_interrupt() as interrupted:
            if loaded.config.trainer.val_only:
                metrics = trainer.evaluate()
                trainer.loggers.log(trainer.step_number, metrics)
                trainer.callbacks.on_evaluation(trainer.step_number, metrics)
            else:
                trainer.fit(interrupted)
    finally:
        run.close()
    return read_result(
        run.directory,
        step=trainer.step_number,
        total_steps=trainer.schedule.total_steps,
        stopped_by=interrupted.signal.name if interrupted.signal else trainer.stopped_by,
    )


def _check_first(run: Run, screen: Screen) -> None:
    """Sample before the first step, and refuse what cannot be meant."""
    checked = run.preflight()
    checked.show(screen)
    if checked.refused:
        raise ValueError("preflight refuses the run; see above. trainer.preflight=False starts it all the same.")


def _show_resumed(screen: Screen, checkpoint: Path, loaded: LoadedConfig, step: int, total_steps: int) -> None:
    """Say where a run resumes, and which of its settings are not those of the checkpoint."""
    screen.print(f"resuming from {checkpoint}, step {step} of {total_steps}", soft_wrap=True)
    for change in changes_since(checkpoint / "run.yaml", loaded):
        screen.print(f"changed since that checkpoint: {change}", soft_wrap=True)
