"""Runs that go back to an earlier checkpoint, and a note of it in their folder, which every later start reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tether.checkpoints.manifest import write_durably
from tether.checkpoints.store import CheckpointStore, step_of
from tether.runtime.disk import read_json, reading

NOTE = "rollbacks.json"
FORGET = "Delete it to go on as if nothing had been rolled back"


@dataclass(frozen=True)
class Rollback:
    """One of a run's."""

    collapsed: int
    """First step with signs of the collapse."""
    to: int
    """Step of the checkpoint that the run went back to, or of an older one that it went back to afterwards."""


def rollbacks_of(root: Path, checkpoint: Path | None) -> list[Rollback]:
    """The rollbacks that a run which starts at a checkpoint has behind it; those of another course do not count.

    Raises:
        ValueError: the note is no longer what was written.
    """
    if checkpoint is None:
        return []
    return [rollback for rollback in _noted(root) if rollback.to <= step_of(checkpoint)]


def _noted(root: Path) -> list[Rollback]:
    note = root / NOTE
    if not note.is_file():
        return []
    with reading(note, FORGET):
        return [Rollback(int(entry["collapsed"]), int(entry["to"])) for entry in read_json(note, list, FORGET)]


def forget_other_rollbacks(root: Path, kept: list[Rollback]) -> None:
    """Leave only these in the note: a run that starts elsewhere, or afresh, has no others."""
    note = root / NOTE
    if kept:
        write_durably(note, json.dumps([asdict(rollback) for rollback in kept]))
    else:
        note.unlink(missing_ok=True)


def roll_back(store: CheckpointStore, to: Path, collapsed: int) -> Path | None:
    """Make a checkpoint the one that the run resumes from.

    A process killed in between has the run go back without a note, from where it can collapse, and go back, again.

    Returns:
        The folder that later checkpoints are in now; None if there were none.
    """
    step = step_of(to)
    done = [replace(one, to=min(one.to, step)) for one in _noted(store.root)]  # they led here, from wherever they began
    aside = store.set_aside(to)
    forget_other_rollbacks(store.root, [*done, Rollback(collapsed, step)])
    return aside
