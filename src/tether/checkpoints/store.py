"""The checkpoint store: a folder is saved completely or not at all, and verified before it is loaded.

The caller decides on the content of a checkpoint. On disk::

    <root>/global_step_20/...                 what the caller wrote
    <root>/global_step_20/manifest.json       size and sha256 of every file
    <root>/latest_checkpointed_iteration.txt  the tracker: "20"

A save writes the files under a temporary name, writes the manifest, renames the folder, updates the tracker and removes
old checkpoints; each stage is on disk before the next begins. A process killed in between leaves at most names with a
leading dot, which `CheckpointStore.resolve` clears when the next run starts. One run at a time writes to a root, which
only contains checkpoints of that run: `CheckpointStore.set_aside` moves those of an earlier run into a folder.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

from tether.checkpoints.manifest import MANIFEST, PARTIAL, find_damage, sync_folder, write_durably, write_manifest

BEST = "best"
"""Folder in the run's folder for the checkpoint of its best evaluation."""
TRACKER = "latest_checkpointed_iteration.txt"
NAME = re.compile(r"global_step_(\d+)")
REPLACED, DOOMED = ".replaced_", ".doomed_"
"""Prefixes of checkpoints that were renamed: replaced by a new one of the same step, or about to be deleted."""
GIB = 2**30

ResumeMode = Literal["auto", "disable", "resume_path"]


class CheckpointDamaged(ValueError):
    """A checkpoint is damaged; the message names the file and a good checkpoint to use instead."""


class DiskFull(OSError):
    """There was not enough space for a checkpoint; the message names the folder and the space needed."""


class CheckpointStore:
    """Saves, finds and prunes the checkpoints under one folder.

    Args:
        root: folder of the checkpoints, `trainer.default_local_dir`.
        keep: number of checkpoints with the highest steps to keep, whichever process saved them; None keeps all.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"trainer.max_actor_ckpt_to_keep={keep}: keep at least 1, or null to keep all")
        self.root = root
        self.keep = keep
        self.protected: Path | None = None
        """A checkpoint that is kept in addition, because a run may still roll back to it."""

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save the files that `write` writes to a folder as the newest checkpoint.

        A checkpoint of the same step is replaced. On any error, earlier checkpoints are unchanged.

        Raises:
            DiskFull: there is not enough space.
        """
        return self.begin(step, lambda folder: partial(write, folder))()

    def begin(self, step: int, start: Callable[[Path], Callable[[], None]]) -> Callable[[], Path]:
        """Save as `save` does, in two stages.

        Args:
            step: step of the checkpoint.
            start: begins to write to a folder and returns a function that completes the writing.

        Returns:
            A function that completes the checkpoint, in any thread; nothing else may be saved before it returns.
        """
        final = self.root / f"global_step_{step}"
        folder = self.root / f"{PARTIAL}{final.name}"
        with self._whole_or_absent(folder, final):
            self.root.mkdir(parents=True, exist_ok=True)
            _remove(folder)
            folder.mkdir()
            finish = start(folder)

        def complete() -> Path:
            with self._whole_or_absent(folder, final):
                finish()
                write_manifest(folder, step)
                self._put_in_place(folder, final)
                write_durably(self.root / TRACKER, str(step))
            self._prune(newest=final)
            return final

        return complete

    @contextmanager
    def _whole_or_absent(self, folder: Path, final: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            full = is_disk_full(error)
            written = _size(folder) if full else 0
            _discard(folder)  # another rank may still be writing to it
            if full:
                raise self._disk_full(final, written, _file_limit(error)) from error
            raise

    def latest(self) -> Path | None:
        """Return the checkpoint to resume from, without verifying its content; None if there is none.

        Raises:
            CheckpointDamaged: the tracker does not name a checkpoint, or a folder with the name of a checkpoint is
                incomplete.
        """
        broken = next((path for path in _named(self.root) if not is_checkpoint(path)), None)
        if broken is not None:
            raise CheckpointDamaged(f"{find_damage(broken, step_of(broken))}. {_offer(broken)}")
        saved, tracker = self.last_saved(), self.root / TRACKER
        if tracker.is_file() and self._tracked() is None:
            raise CheckpointDamaged(
                f"{tracker}: names {tracker.read_text(errors='replace')[:40]!r}, and there is no such checkpoint. "
                f"Bring it back, or delete the tracker to {f'resume from {saved}' if saved else 'start from scratch'}"
            )
        return saved

    def last_saved(self) -> Path | None:
        """Return the checkpoint that the tracker names, or else the one with the highest step, or None."""
        return self._tracked() or max(_checkpoints(self.root), key=step_of, default=None)

    def newest_before(self, step: int) -> Path | None:
        """Return the checkpoint with the highest step below `step`; None if there is none."""
        return max((path for path in _checkpoints(self.root) if step_of(path) < step), key=step_of, default=None)

    def resolve(self, resume_mode: ResumeMode, resume_from_path: Path | None = None) -> Path | None:
        """Delete remains of killed processes; return the verified checkpoint to start from, or None for a new run.

        Args:
            resume_mode: ``auto``: the latest checkpoint, if any; ``disable``: none; ``resume_path``:
                `resume_from_path`.
            resume_from_path: a ``global_step_<N>`` folder, for ``resume_path``.

        Raises:
            ValueError: ``resume_path`` without a checkpoint at the path.
            CheckpointDamaged: raised by `verify` or `latest`.
        """
        if (tracker := self.root / TRACKER).is_dir():
            raise CheckpointDamaged(f"{tracker}: is a folder; the file of that name has the last step. Move it away")
        self._clear_leftovers()
        if resume_mode == "disable":
            return None
        chosen = _explicit_checkpoint(resume_from_path) if resume_mode == "resume_path" else self.latest()
        if chosen is not None:
            verify(chosen)
        return chosen

    def set_aside(self, start: Path | None) -> Path | None:
        """Move checkpoints that are not ancestors of `start` aside, for a run that begins at `start`.

        Args:
            start: a checkpoint; None: the run begins from scratch.

        Returns:
            The folder to which they were moved, ``earlier_<N>`` of the root; None if there were none.
        """
        is_here = start is not None and start.parent.resolve() == self.root.resolve()
        step = step_of(start) if start is not None and is_here else -1
        others = [path for path in _named(self.root) if step_of(path) > step or not is_checkpoint(path)]
        if is_here:  # before the move, so that the rollback is complete even if the process is killed in between
            write_durably(self.root / TRACKER, str(step))
        aside = self._move_aside(others) if others else None
        if not is_here:
            (self.root / TRACKER).unlink(missing_ok=True)
        return aside

    def _move_aside(self, paths: Sequence[Path]) -> Path:
        number = 1
        while (aside := self.root / f"earlier_{number}").exists():
            number += 1
        aside.mkdir()
        for path in paths:
            if path.is_symlink():
                # A relative link would point elsewhere from the new folder.
                (aside / path.name).symlink_to(path.resolve())
                path.unlink()
            else:
                path.rename(aside / path.name)
        sync_folder(aside)
        sync_folder(self.root)
        return aside

    def _tracked(self) -> Path | None:
        tracker = self.root / TRACKER
        if not tracker.is_file():
            return None
        tracked = self.root / f"global_step_{tracker.read_text(errors='replace').strip()}"
        return tracked if tracked in _checkpoints(self.root) else None

    def _put_in_place(self, folder: Path, final: Path) -> None:
        replaced = self.root / f"{REPLACED}{final.name}"
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        folder.rename(final)
        sync_folder(self.root)
        _discard(replaced)

    def _prune(self, newest: Path) -> None:
        if self.keep is None:
            return
        older = [path for path in _checkpoints(self.root) if step_of(path) < step_of(newest) and path != self.protected]
        for path in sorted(older, key=step_of, reverse=True)[self.keep - 1 :]:
            doomed = self.root / f"{DOOMED}{path.name}"
            _remove(doomed)
            path.rename(doomed)  # rename first: a half-deleted folder must not look like a checkpoint
            _discard(doomed)

    def _clear_leftovers(self) -> None:
        for replaced in self.root.glob(f"{REPLACED}*"):
            final = self.root / replaced.name.removeprefix(REPLACED)
            if not final.exists():  # the process was killed between the two renames that replace a checkpoint
                replaced.rename(final)
        for prefix in (PARTIAL, REPLACED, DOOMED):
            for leftover in self.root.glob(f"{prefix}*"):
                _discard(leftover)

    def _disk_full(self, final: Path, written: int, largest: str | None) -> DiskFull:
        previous = self.last_saved()
        if previous is None:
            needed, note = f"more than {_readable(written)}", "No checkpoint was saved before."
        else:
            needed, note = _readable(max(written, _size(previous))), f"{previous} is untouched."
        if largest is not None:
            return DiskFull(
                errno.EFBIG,
                f"a file of {final} is larger than may be written there{largest}. Raise the limit (ulimit -f), or "
                f"point trainer.default_local_dir to a file system that takes larger files. {note}",
            )
        # Measure the parent, because the folder does not exist yet.
        exists = self.root if self.root.exists() else self.root.parent
        free = _readable(shutil.disk_usage(exists).free)
        return DiskFull(
            errno.ENOSPC,
            f"disk full while saving {final}: it needs {needed}, {free} are free. "
            f"Free space there, point trainer.default_local_dir to another disk, or keep fewer checkpoints "
            f"(trainer.max_actor_ckpt_to_keep). {note}",
        )


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint, ``global_step_<N>``."""
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not named global_step_<N>"
    return int(match[1])


def run_of(checkpoint: Path) -> Path:
    """Return the run's folder for a checkpoint, also after the run was copied."""
    return checkpoint.parent.parent if checkpoint.parent.name == BEST else checkpoint.parent


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has the name of a checkpoint and is complete; its content is not verified."""
    return NAME.fullmatch(path.name) is not None and (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> Path | None:
    """Return the verified checkpoint at a path, which is itself or the latest in a run's folder; None without one.

    Raises:
        CheckpointDamaged: raised by `verify` or `CheckpointStore.latest`.
    """
    path = _without_link(path)
    is_named = NAME.fullmatch(path.name) is not None and os.path.lexists(path)
    checkpoint = path if is_named else CheckpointStore(path).latest()
    if checkpoint is not None:
        verify(checkpoint)
    return checkpoint


def verify(checkpoint: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointDamaged: a file is missing, not listed, or differs in any byte.
    """
    damage = find_damage(checkpoint, step_of(checkpoint))
    if damage is not None:
        raise CheckpointDamaged(f"{damage}. {_offer(checkpoint)}")


def _offer(broken: Path) -> str:
    """Return advice for a run whose checkpoint is damaged."""
    others = sorted(_checkpoints(broken.parent), key=step_of, reverse=True)
    good = next((path for path in others if path != broken and find_damage(path, step_of(path)) is None), None)
    if good is None:
        return "There is no other good checkpoint here; to train, start again with trainer.resume_mode=disable"
    return (
        f"The last good one in that folder is {good}. To continue from it: trainer.resume_mode=resume_path "
        f"{shlex.quote(f'trainer.resume_from_path={good}')}"
    )


def _named(root: Path) -> list[Path]:
    """Return all paths with the name of a checkpoint."""
    return [path for path in root.glob("global_step_*") if NAME.fullmatch(path.name)]


def _checkpoints(root: Path) -> list[Path]:
    return [path for path in _named(root) if is_checkpoint(path)]


def _explicit_checkpoint(path: Path | None) -> Path:
    if path is None:
        raise ValueError("trainer.resume_mode=resume_path: set trainer.resume_from_path to a global_step_<N> folder")
    path = _without_link(path)
    if not is_checkpoint(path):
        nearby = sorted([*_checkpoints(path), *_checkpoints(path.parent)], key=step_of)
        near = f"Near it: {', '.join(map(str, nearby))}" if nearby else "There is none near it."
        raise ValueError(
            f"trainer.resume_from_path={path}: not a checkpoint. "
            f"Name a global_step_<N> folder that has a {MANIFEST}. {near}"
        )
    return path


def _without_link(path: Path) -> Path:
    """Return the target checkpoint of a link with another name, or of a path such as ``.``; else the path itself."""
    target = path.resolve()
    return target if NAME.fullmatch(target.name) and not NAME.fullmatch(path.name) else path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Remove a path that is no longer visible; files that NFS still keeps open are left to the next start."""
    with suppress(OSError):
        _remove(path)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means a full disk, which torch and safetensors report with their own exception types."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    return any(sign in str(error) for sign in ("No space left", "File too large", "quota exceeded", "inline_container"))


def _file_limit(error: BaseException) -> str | None:
    """Return the file-size limit that a failed write exceeded; None: the disk is full."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited, said = limit != resource.RLIM_INFINITY, str(error)
    if isinstance(error, OSError):
        met = error.errno == errno.EFBIG
    else:
        met = "File too large" in said or (limited and "inline_container" in said)  # torch's message has no reason
    if not met:
        return None
    return f": files of this process end at {_readable(limit)}" if limited else ""


def _readable(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"
