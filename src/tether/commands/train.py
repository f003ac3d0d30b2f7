"""Training for the command line and Python, with restarts after lost ranks and rollbacks after a collapse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tether.checkpoints import CheckpointStore, roll_back
from tether.commands.build import build
from tether.commands.result import TrainingResult, read_result
from tether.config import LoadedConfig, RunConfig, changes_since
from tether.loop.engine import explain_out_of_memory
from tether.loop.parts import Callbacks
from tether.loop.run import Run
from tether.plan.devices import GIB, Device, gib, host_memory
from tether.plan.planning import Planner
from tether.plan.report import cause
from tether.runtime.interrupt import Interrupt, graceful_interrupt
from tether.runtime.machine import available_memory, computes_in_bfloat16, resolve_device
from tether.runtime.ranks import RankLost
from tether.runtime.terminal import Activity, Screen


@dataclass(frozen=True)
class _Lost:
    """An attempt to train that ended because a rank was lost."""

    step: int | None
    """Step in progress when the rank was lost; None: the models were still being built."""
    reason: str
    instead: tuple[str, int] | None = None
    """Key and value with which the run should fit into memory, as in `RankLost`."""

    @property
    def when(self) -> str:
        return "while the models were built" if self.step is None else f"in step {self.step}"


@dataclass(frozen=True)
class _Rollback:
    """An attempt to train that ended because the policy collapsed."""

    collapsed: int
    target: Path
    """Checkpoint of an earlier step, to which the run returns."""


@explain_out_of_memory()
def train(loaded: LoadedConfig, callbacks: Callbacks | None = None) -> TrainingResult:
    """Train with a configuration; an existing run in its folder resumes.

    After a lost rank, all ranks are restarted from the last checkpoint; if a rank ran out of memory, with half of the
    micro-batch. With ``trainer.on_collapse=rollback`` a run whose policy has collapsed returns to an earlier
    checkpoint. Callbacks are then called again for repeated steps.

    Raises:
        ValueError: inputs are unusable, a checkpoint belongs to another run, the preflight refuses the run, or memory
            ran out.
        RankLost: ranks were lost more often than ``trainer.max_restarts``, or twice in the same step.
    """
    screen, callbacks, earlier = Screen(), callbacks or Callbacks(), list[_Lost]()
    for note in loaded.notes:
        screen.print(f"note: {note}", style="dim", soft_wrap=True)
    if warning := memory_warning(loaded.config):
        if loaded.config.trainer.check_memory == "refuse":
            raise ValueError(warning)
        screen.print(warning, style="bold yellow", soft_wrap=True)
    while not isinstance(ended := _attempt(loaded, callbacks, screen), TrainingResult):
        if isinstance(ended, _Rollback):
            loaded = loaded.with_values({"trainer.resume_mode": "auto"}, "rollback")
            screen.print(f"after step {ended.collapsed} the run goes back to {ended.target}", style="bold yellow")
            continue
        max_restarts = loaded.config.trainer.max_restarts
        if ended.instead and max_restarts:  # not counted, because the value is halved until it is 1
            loaded, start = _resume_config(loaded, ended)
            key, value = ended.instead
            loaded = loaded.with_values({key: value}, "what fits into memory")
            screen.print(
                f"{ended.reason}\nThat was {ended.when}. The run continues {start} with {key}={value} and the same "
                "result; set that to make it permanent",
                style="bold yellow",
                soft_wrap=True,
            )
            continue
        if previous := [lost for lost in earlier if lost.step == ended.step]:
            raise RankLost(
                f"{ended.reason}\nThat was {ended.when}, for the second time ({previous[0].reason.splitlines()[0]}): "
                "the run is not restarted. The same command tries it once more"
            )
        if len(earlier) == max_restarts:
            raise RankLost(
                f"{ended.reason}\nThat was {ended.when}; trainer.max_restarts={max_restarts} restarts are used up"
            )
        earlier.append(ended)
        loaded, start = _resume_config(loaded, ended)
        restart = f"Restart {len(earlier)} of {max_restarts} (trainer.max_restarts)"
        screen.print(f"{ended.reason}\nThat was {ended.when}. {restart}, {start}", style="bold yellow", soft_wrap=True)
    return ended


def memory_warning(config: RunConfig) -> str | None:
    """Return a sentence if a text run does not fit into its devices' memory; None if it fits or that is unknown."""
    if config.env.train.id is not None or config.trainer.check_memory == "off":
        return None
    device = resolve_device(config.trainer.device)
    size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else available_memory(device)
    if size is None or device.type == "mps":
        return None
    memory = size / GIB
    machine = Device(device.type, memory, 1, 1, 1, is_cpu=device.type == "cpu", bfloat16=computes_in_bfloat16(device))
    try:
        plan = Planner(config, machine, host_memory=host_memory()).plan()
    except ValueError:  # the sizes of the model are unknown, or the run itself reports the problem
        return None
    if plan.verdict != "does not fit":
        return None
    reason = plan.problem or f"{gib(plan.peak)} of {gib(size)}. {cause(plan)}"
    return (
        f"this run does not fit: {reason} `tether plan` with the same arguments "
        "lists what makes it fit; trainer.check_memory=off leaves this check out"
    )


def _attempt(loaded: LoadedConfig, callbacks: Callbacks, screen: Screen) -> TrainingResult | _Lost | _Rollback:
    """Train with one set of processes, all of which have ended when this returns."""
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
            _run_preflight(run, screen)
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
            return _Rollback(trainer.step_number, trainer.rollback_target)
    return read_result(
        run.directory,
        step=trainer.step_number,
        total_steps=trainer.schedule.total_steps,
        stopped_by=interrupted.signal.name if interrupted.signal else trainer.stopped_by,
    )


def _resume_config(loaded: LoadedConfig, lost: _Lost) -> tuple[LoadedConfig, str]:
    """Return the configuration of the next attempt, and a text that says from where it starts."""
    # Until the models of an attempt are built, the checkpoints in the folder may belong to an earlier run.
    trainer = loaded.config.trainer
    saved = CheckpointStore(Path(trainer.default_local_dir)).last_saved()
    if lost.step is None or saved is None or trainer.val_only:
        return loaded, "from where the run began"
    return loaded.with_values({"trainer.resume_mode": "auto"}, "restart"), f"from {saved}"


def _run_preflight(run: Run, screen: Screen) -> None:
    """Sample before the first step, and refuse a run with a finding that prevents it."""
    with Activity(screen) as activity:
        activity.begin("preflight: sampling")
        checked = run.preflight()
    checked.show(screen)
    if checked.refused:
        raise ValueError("preflight refuses the run; see above. trainer.preflight=False starts it anyway.")


def _show_resumed(screen: Screen, checkpoint: Path, loaded: LoadedConfig, step: int, total_steps: int) -> None:
    """Print where a run resumes, and which settings differ from those of the checkpoint."""
    screen.print(f"resuming from {checkpoint}, step {step} of {total_steps}", soft_wrap=True)
    for change in changes_since(checkpoint / "run.yaml", loaded):
        screen.print(f"changed since that checkpoint: {change}", soft_wrap=True)
