"""The protocol of a hub of datasets or models, and the check of a download against its listing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tether.runtime.hubs import MODELSCOPE, uses_modelscope
from tether.runtime.install import pip_install

LOCAL = "file:"
"""Prefix of names of local datasets."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a hub, with the size and hash for checking a download."""

    size: int
    sha256: str | None
    git_sha1: str | None = None
    """Git's hash of a small file."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one revision."""

    revision: str
    """Identifier of the revision, which changes with any file."""
    files: Mapping[str, RemoteFile]


class Hub(Protocol):
    """A hub with published files. Both methods raise a ValueError if the hub refuses or cannot be reached."""

    def listing_of(self, repository: str, revision: str | None) -> Listing:
        """Return the files of a repository at a revision; None: the newest."""

    def fetch(self, repository: str, listing: Listing, path: str, to: Path) -> None:
        """Download a file of a listing to a path, resuming an interrupted download."""


def asked_for(repository: str, revision: str | None) -> str:
    """Return the repository and its revision, as the beginning of error messages."""
    return f"{repository} at {revision}:" if revision else f"{repository}:"


def hub_of(repository: str) -> tuple[Hub, str]:
    """Return a dataset's hub, and its name, which has the prefix ``modelscope:`` on ModelScope.

    Args:
        repository: ``owner/name``, on ModelScope with the prefix ``modelscope:`` or if VERL_USE_MODELSCOPE is true; or
            a local path with the prefix ``file:``.

    Raises:
        ValueError: ModelScope's client is not installed, or the local files do not exist.
    """
    if repository.startswith(LOCAL):
        from tether.integrations.hubs.local import LocalFiles

        return LocalFiles(Path(repository.removeprefix(LOCAL))), repository
    name = repository.removeprefix(MODELSCOPE)
    if name == repository and not uses_modelscope():
        from tether.integrations.hubs.hugging_face import HuggingFace

        return HuggingFace(), name
    try:
        from tether.integrations.hubs.modelscope_data import ModelScope
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: ModelScope needs {error.name}: {pip_install('modelscope')}") from error
    return ModelScope(), MODELSCOPE + name


def damage(file: Path, remote: RemoteFile) -> str | None:
    """Return how a file differs from the hub's listing, or None."""
    size = file.stat().st_size
    if size != remote.size:
        return f"has {size} bytes and not {remote.size}"
    for name, hashed, expected in (
        ("sha256", hashlib.sha256(), remote.sha256),
        ("git hash", hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False), remote.git_sha1),
    ):
        if expected is not None:
            with file.open("rb") as content:
                while block := content.read(1 << 20):
                    hashed.update(block)
            if hashed.hexdigest() != expected:
                return f"has the {name} {hashed.hexdigest()} and not {expected}"
            return None
    return None


def sha256_of(file: Path) -> str:
    """Return the hash of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
