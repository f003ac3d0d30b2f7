"""The Hugging Face hub through its own client: the files of a dataset, and one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

DATASET = "dataset"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a hub, and what its bytes have to be."""

    size: int
    sha256: str | None
    git_sha1: str | None = None
    """Of a small file: git's hash of it."""


@dataclass(frozen=True)
class Listing:
    """A dataset at one commit."""

    revision: str
    files: Mapping[str, RemoteFile]


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


@contextmanager
def _asking(what: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        refusal = str(error).strip().splitlines()[-1]
        raise ValueError(f"{what}: the Hugging Face hub does not give it ({refusal})") from error
    except OfflineModeIsEnabled as error:
        raise ValueError(f"{what}: the Hugging Face hub cannot be asked, HF_HUB_OFFLINE is set; unset it") from error
    except Exception as error:  # of whichever HTTP client the installed huggingface_hub uses
        raise ValueError(
            f"{what}: the Hugging Face hub at {constants.ENDPOINT} cannot be reached ({type(error).__name__}: "
            f"{error}); the same command goes on where it stopped. HF_ENDPOINT names another"
        ) from error


def listing_of(repository: str, revision: str | None) -> Listing:
    """The files of a dataset at a revision; None: the newest.

    Raises:
        ValueError: the hub does not give it, or cannot be reached.
    """
    with _asking(repository):
        info = HfApi(endpoint=constants.ENDPOINT).dataset_info(
            repository, revision=revision, files_metadata=True, timeout=30
        )
    files = {
        file.rfilename: RemoteFile(
            file.size or 0, file.lfs.sha256 if file.lfs else None, None if file.lfs else file.blob_id
        )
        for file in info.siblings or ()
    }
    return Listing(str(info.sha), files)


def fetch(repository: str, revision: str, path: str, remote: RemoteFile, to: Path) -> None:
    """Write a file of a dataset to a path, going on where an earlier call was cut off.

    Raises:
        ValueError: the hub does not give it, or cannot be reached.
    """
    with _asking(f"{repository}/{path}"):
        url = hf_hub_url(repository, path, repo_type=DATASET, revision=revision, endpoint=constants.ENDPOINT)
        location = get_hf_file_metadata(url, timeout=30).location
        headers = build_hf_headers() if urlsplit(location).netloc == urlsplit(url).netloc else {}
        with to.open("ab", buffering=0) as file:  # what came stays, whatever ends the process
            begun = file.tell()
            http_get(
                location, file, resume_size=begun, headers=headers, expected_size=remote.size, displayed_filename=path
            )
