"""Training, for the command line and for Python: to the last step, or to a signal; a rank that is lost is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tether.assembly.build import build
from tether.assembly.common import Run
from tether.checkpoints import CheckpointStore, roll_back
from tether.commands.result import TrainingResult, read_result
from tether.config import LoadedConfig, changes_since
from tether.runtime.interrupt import Interrupt, graceful_interrupt
from tether.runtime.ranks import RankLost
from tether.runtime.terminal import Activity, Screen
from tether.trainer import Callbacks
from tether.training import named_out_of_memory


@dataclass(frozen=True)
class _Lost:
    """An attempt that ended because a rank was lost."""

    step: int | None
    """That was in progress; None: the models were being built."""
    why: str
    instead: tuple[str, int] | None = None
    """See `RankLost`."""

    @property
    def place(self) -> str:
        return "while the models were built" if self.step is None else f"in step {self.step}"


@dataclass(frozen=True)
class _GoesBack:
    """An attempt that ended because the policy has collapsed."""

    collapsed: int
    to: Path
    """Checkpoint of an earlier step."""


@named_out_of_memory()
def train(loaded: LoadedConfig, callbacks: Callbacks | None = None) -> TrainingResult:
    """Train what a configuration describes, and tell the callbacks; a run that was begun in its folder resumes.

    When a rank is lost, all of them are started again from the last checkpoint; so it is when a rank has no memory for
    a micro-batch, with half of it. A run whose policy has collapsed goes back with ``trainer.on_collapse=rollback``.
    Callbacks hear of the steps since then a second time.

    Raises:
        ValueError: unusable inputs, a checkpoint of another run, a preflight that refuses, or memory that ran out.
        RankLost: more often than ``trainer.max_restarts``, or twice in the same step.
    """
    screen, callbacks, earlier = Screen(), callbacks or Callbacks(), list[_Lost]()
    for note in loaded.notes:
        screen.print(f"note: {note}", style="dim", soft_wrap=True)
    while not isinstance(ended := _attempt(loaded, callbacks, screen), TrainingResult):
        if isinstance(ended, _GoesBack):
            loaded = loaded.with_values({"trainer.resume_mode": "auto"}, "rollback")
            screen.print(f"after step {ended.collapsed} the run goes back to {ended.to}", style="bold yellow")
            continue
        most = loaded.config.trainer.max_restarts
        if ended.instead and most:  # each is half of the one before, down to a single row
            loaded, start = _resuming(loaded, ended)
            key, value = ended.instead
            loaded = loaded.with_values({key: value}, "what fits into memory")
            screen.print(
                f"{ended.why}\nThat was {ended.place}. The run goes on {start} with {key}={value} and the same result; "
                "write that to make it permanent",
                style="bold yellow",
                soft_wrap=True,
            )
            continue
        if again := [lost for lost in earlier if lost.step == ended.step]:
            raise RankLost(
                f"{ended.why}\nThat was {ended.place}, and so it was before ({again[0].why.splitlines()[0]}): the run "
                "is not started again. The same command tries it once more"
            )
        if len(earlier) == most:
            raise RankLost(f"{ended.why}\nThat was {ended.place}; trainer.max_restarts={most} restarts are used up")
        earlier.append(ended)
        loaded, start = _resuming(loaded, ended)
        screen.print(
            f"{ended.why}\nThat was {ended.place}. Restart {len(earlier)} of {most} (trainer.max_restarts), {start}",
            style="bold yellow",
            soft_wrap=True,
        )
    return ended


def _attempt(loaded: LoadedConfig, callbacks: Callbacks, screen: Screen) -> TrainingResult | _Lost | _GoesBack:
    """Train with one set of processes, all of which have ended afterwards."""
    try:
        with Activity(screen) as activity:
            run = build(loaded, activity.begin)
    except RankLost as error:
        return _Lost(None, str(error), error.instead)
    trainer, interrupted = run.trainer, Interrupt()
    trainer.callbacks = callbacks
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
    except RankLost as error:
        if interrupted():
            raise
        return _Lost(trainer.step_number + 1, str(error), error.instead)
    finally:
        run.close()
    if trainer.rollback_target:
        assert trainer.alarms.collapsed_since is not None
        roll_back(trainer.persistence.store, trainer.rollback_target, trainer.alarms.collapsed_since)
        if not interrupted():
            return _GoesBack(trainer.step_number, trainer.rollback_target)
    return read_result(
        run.directory,
        step=trainer.step_number,
        total_steps=trainer.schedule.total_steps,
        stopped_by=interrupted.signal.name if interrupted.signal else trainer.stopped_by,
    )


def _resuming(loaded: LoadedConfig, lost: _Lost) -> tuple[LoadedConfig, str]:
    """The configuration of the next attempt, and where it begins.

    Until an attempt has been built, the checkpoints in the folder may be those of an earlier run; from then on they all
    lead to this one.
    """
    trainer = loaded.config.trainer
    saved = CheckpointStore(Path(trainer.default_local_dir)).last_saved()
    if lost.step is None or saved is None or trainer.val_only:
        return loaded, "from where the run began"
    return loaded.with_values({"trainer.resume_mode": "auto"}, "restart"), f"from {saved}"


def _check_first(run: Run, screen: Screen) -> None:
    """Sample before the first step, and refuse what cannot be meant."""
    with Activity(screen) as activity:
        activity.begin("preflight: sampling")
        checked = run.preflight()
    checked.show(screen)
    if checked.refused:
        raise ValueError("preflight refuses the run; see above. trainer.preflight=False starts it all the same.")


def _show_resumed(screen: Screen, checkpoint: Path, loaded: LoadedConfig, step: int, total_steps: int) -> None:
    """Say where a run resumes, and which of its settings are not those of the checkpoint."""
    screen.print(f"resuming from {checkpoint}, step {step} of {total_steps}", soft_wrap=True)
    for change in changes_since(checkpoint / "run.yaml", loaded):
        screen.print(f"changed since that checkpoint: {change}", soft_wrap=True)
