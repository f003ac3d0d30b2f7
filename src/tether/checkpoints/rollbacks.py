"""Rollbacks of a run to an earlier checkpoint, recorded in a file of its folder that every later start reads."""

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
    """One rollback of a run."""

    collapsed: int
    """First step with signs of the collapse."""
    to: int
    """Step of the checkpoint to which the run rolled back, or of an older one if a later rollback went further back."""


def rollbacks_of(root: Path, checkpoint: Path | None) -> list[Rollback]:
    """Return the rollbacks that precede a checkpoint, without those of abandoned steps.

    Raises:
        ValueError: the file is damaged.
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


def forget_other_rollbacks(root: Path, rollbacks: list[Rollback]) -> None:
    """Keep only these rollbacks in the file, because a run that starts elsewhere or from scratch has no others."""
    note = root / NOTE
    if rollbacks:
        write_durably(note, json.dumps([asdict(rollback) for rollback in rollbacks]))
    else:
        note.unlink(missing_ok=True)


def roll_back(store: CheckpointStore, to: Path, collapsed: int) -> Path | None:
    """Make a checkpoint the one that the run resumes from.

    If the process is killed in between, the run resumes from the checkpoint without a record of the rollback; it may
    then collapse and roll back again.

    Returns:
        The folder to which later checkpoints were moved; None if there were none.
    """
    step = step_of(to)
    done = [replace(one, to=min(one.to, step)) for one in _noted(store.root)]  # they lead to this step now
    aside = store.set_aside(to)
    forget_other_rollbacks(store.root, [*done, Rollback(collapsed, step)])
    return aside
