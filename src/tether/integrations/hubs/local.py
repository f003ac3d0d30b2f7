"""Local files instead of a hub, for datasets that were downloaded by other means."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tether.integrations.hubs.catalogue import Dataset
from tether.integrations.hubs.hub import LOCAL, Listing, RemoteFile, sha256_of

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".arrow")


def local_dataset(dataset: Dataset, path: Path) -> tuple[Dataset, str, str]:
    """Return the dataset with local files, its name for `tether.integrations.hubs.hub.hub_of`, and its revision.

    Raises:
        ValueError: there is no file of a supported kind.
    """
    name = f"{LOCAL}{path.resolve()}"
    revision = LocalFiles(path).listing_of(name, None).revision
    return (dataset.of_file(path.name) if path.is_file() else dataset), name, revision


class LocalFiles:
    """A hub with one dataset: a local file, or a folder with the hub's layout. Its revision is a hash of the files.

    Args:
        path: the file or folder.

    Raises:
        ValueError: the path does not exist, or the file is of an unsupported kind.
    """

    def __init__(self, path: Path) -> None:
        self._files = {path.name: path} if path.is_file() else dict(_below(path))
        if not path.exists():
            raise ValueError(f"--from {path}: there is no such file or folder")
        if not self._files or (path.is_file() and not path.name.endswith(ENDINGS)):
            raise ValueError(f"--from {path}: no {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]} file")

    def listing_of(self, repository: str, revision: str | None) -> Listing:
        files = {name: RemoteFile(file.stat().st_size, sha256_of(file)) for name, file in self._files.items()}
        hashes = "".join(f"{name} {file.sha256}\n" for name, file in files.items())
        return Listing(hashlib.sha256(hashes.encode()).hexdigest(), files)

    def fetch(self, repository: str, listing: Listing, path: str, to: Path) -> None:
        to.unlink(missing_ok=True)
        to.symlink_to(self._files[path].resolve())


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if (
            file.is_file()
            and file.name.endswith(ENDINGS)
            and not any(component.startswith(".") for component in name.parts)
        ):
            yield name.as_posix(), file
