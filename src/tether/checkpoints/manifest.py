"""The manifest of a folder: size and sha256 of every file in it, so that a single changed byte is detected.

It is written last, after every other file is on disk, so that a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from tether.runtime.disk import check_readable, follow_umask, read_json
from tether.runtime.threads import num_threads

MANIFEST = "manifest.json"
CARD = ("README.md", "curve.png")
"""Files that `tether card` adds to a checkpoint later, for people to read; loading does not depend on them."""
PARTIAL = ".writing_"
"""Prefix of names that are still being written; a killed process may leave such files."""
FORMAT = 1
MAX_HASH_THREADS = 8


class Entry(TypedDict):
    """A file in the manifest."""

    size: int
    sha256: str


def write_manifest(folder: Path, step: int) -> None:
    """Sync every file of a folder to disk, record its hash, then write the manifest."""
    names = sorted(_names(folder))
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, num_threads())) as pool:
        entries = dict(zip(names, pool.map(lambda name: _entry(folder / name, durable=True), names), strict=True))
    body = {"format": FORMAT, "step": step, "saved_at_ns": time.time_ns(), "files": entries}
    write_durably(folder / MANIFEST, json.dumps(body | {"checksum": _checksum(body)}, indent=1))
    follow_umask(folder, like=folder / MANIFEST)
    for path in filter(Path.is_dir, folder.rglob("*")):
        sync_folder(path)


def find_damage(folder: Path, step: int) -> str | None:
    """Return a message about the first file of a folder that differs from the manifest; None if all agree.

    Raises:
        ValueError: this user has no permission to read a file.
    """
    path = folder / MANIFEST
    check_readable([folder, *sorted(folder.rglob("*"))])
    if not path.is_file():
        gone = f" (a link to {folder.readlink()})" if folder.is_symlink() and not folder.exists() else ""
        return f"{folder}: not whole{gone}, its {MANIFEST} is missing"
    try:
        manifest = read_json(path, dict, "")
        format_version = manifest["format"]
        body = {key: value for key, value in manifest.items() if key != "checksum"}
        intact = manifest["checksum"] == _checksum(body) and manifest["step"] == step
    except (ValueError, KeyError):  # not JSON, or JSON with other content
        return f"{path}: damaged, it is not what was saved"
    if format_version != FORMAT:
        return (
            f"{path}: has format {format_version!r}, and this version of tether reads {FORMAT}; use the version of "
            "tether that saved it"
        )
    if not intact:
        return f"{path}: damaged, it is not what was saved"
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        return f"{path}: damaged, it does not list files"
    added = {name for name in _names(folder) - listed.keys() if Path(name).name not in CARD}
    unlisted = sorted(added - {MANIFEST})
    if unlisted:
        return f"{folder / unlisted[0]}: not part of the checkpoint, its {MANIFEST} does not list it; move it away"
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, num_threads())) as pool:
        problems = pool.map(lambda item: _file_damage(folder / item[0], item[1]), listed.items())
        return next((problem for problem in problems if problem is not None), None)


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file, hashing several at a time."""
    with ThreadPoolExecutor(min(MAX_HASH_THREADS, num_threads())) as pool:
        return [entry["sha256"] for entry in pool.map(lambda path: _entry(path, durable=False), paths)]


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it has either the old or the new text, even if the process or the machine dies."""
    new = path.with_name(f"{PARTIAL}{path.name}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        new.unlink(missing_ok=True)
        raise
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk; a rename is only durable after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> set[str]:
    """Return every file and link below a folder, except NFS's placeholders of deleted open files."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)) for path in paths if not path.name.startswith(".nfs")}


def _file_damage(path: Path, expected: Mapping[str, object]) -> str | None:
    if not path.is_file():
        return f"{path}: missing, though the manifest lists it"
    if path.stat().st_size != expected.get("size"):
        return f"{path}: damaged, {path.stat().st_size} bytes instead of {expected.get('size')}"
    if _entry(path, durable=False) != expected:
        return f"{path}: damaged, its sha256 is not that of the file that was saved"
    return None


def _entry(path: Path, *, durable: bool) -> Entry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if durable:
            os.fsync(file.fileno())
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def _checksum(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
