"""The protocol of a hub of datasets, and the check of a download against its listing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tether.runtime.hubs import MODELSCOPE, uses_modelscope
from tether.runtime.install import pip_install

LOCAL = "file:"
"""Begins the name of a dataset that is here."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a hub, and what its bytes have to be."""

    size: int
    sha256: str | None
    git_sha1: str | None = None
    """Of a small file: git's hash of it."""


@dataclass(frozen=True)
class Listing:
    """A dataset as it stood when it was listed."""

    revision: str
    """Another one after any change."""
    files: Mapping[str, RemoteFile]


class Hub(Protocol):
    """Where published datasets are. Both methods raise ValueError: the hub does not give it, or cannot be reached."""

    def listing_of(self, repository: str, revision: str | None) -> Listing:
        """The files of a dataset at a revision; None: the newest."""

    def fetch(self, repository: str, listing: Listing, path: str, to: Path) -> None:
        """Write a file of a listing to a path, going on where an earlier call was cut off."""


def asked_for(repository: str, revision: str | None) -> str:
    """A dataset and its revision, as messages begin."""
    return f"{repository} at {revision}:" if revision else f"{repository}:"


def hub_of(repository: str) -> tuple[Hub, str]:
    """The hub that has a dataset, and the dataset's name, which begins with ``modelscope:`` where it is ModelScope's.

    Args:
        repository: ``owner/name``; of ModelScope after ``modelscope:``, and where VERL_USE_MODELSCOPE is true; or the
            path of files here after ``file:``.

    Raises:
        ValueError: ModelScope's client is not installed, or the files are not there.
    """
    if repository.startswith(LOCAL):
        from tether.data.published.local import LocalFiles

        return LocalFiles(Path(repository.removeprefix(LOCAL))), repository
    name = repository.removeprefix(MODELSCOPE)
    if name == repository and not uses_modelscope():
        from tether.data.published.hugging_face import HuggingFace

        return HuggingFace(), name
    try:
        from tether.data.published.modelscope import ModelScope
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: ModelScope needs {error.name}: {pip_install('modelscope')}") from error
    return ModelScope(), MODELSCOPE + name


def damage(file: Path, remote: RemoteFile) -> str | None:
    """Where a file is not the one that the hub named: how; None where it is."""
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
    """The hash of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
