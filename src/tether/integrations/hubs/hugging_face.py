"""Downloads files of the Hugging Face hub with its client."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from tether.integrations.hubs.hub import Listing, RemoteFile, asked_for
from tether.runtime.hugging_face import hugging_face_errors

if TYPE_CHECKING:
    from typing_extensions import Buffer

FIX = "name another hub in HF_ENDPOINT. The same command then goes on where it stopped"


class _Unbuffered(io.FileIO):
    """An unbuffered file: received data are kept if the process is killed, and a full disk raises an error."""

    def write(self, content: Buffer) -> int:
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[super().write(remaining) :]
        return memoryview(content).nbytes


class HuggingFace:
    """The Hugging Face hub; revisions are resolved to commits.

    Args:
        kind: kind of repositories, in the terms of the hub's client.
    """

    def __init__(self, kind: Literal["dataset", "model"] = "dataset") -> None:
        self._kind = kind

    def listing_of(self, repository: str, revision: str | None) -> Listing:
        with hugging_face_errors(asked_for(repository, revision), FIX):
            hub = HfApi(endpoint=constants.ENDPOINT)
            ask = hub.model_info if self._kind == "model" else hub.dataset_info
            info = ask(repository, revision=revision, files_metadata=True, timeout=30)
        files = {
            file.rfilename: RemoteFile(
                file.size or 0, file.lfs.sha256 if file.lfs else None, None if file.lfs else file.blob_id
            )
            for file in getattr(info, "siblings", None) or ()
        }
        return Listing(str(info.sha), files)

    def fetch(self, repository: str, listing: Listing, path: str, to: Path) -> None:
        size = listing.files[path].size
        if to.exists() and to.stat().st_size > size:  # a partial download of a different file, or a damaged one
            to.unlink()
        if to.exists() and to.stat().st_size == size:  # complete; requesting an empty range would fail
            return
        with hugging_face_errors(f"{repository}/{path}:", FIX):
            url = hf_hub_url(
                repository, path, repo_type=self._kind, revision=listing.revision, endpoint=constants.ENDPOINT
            )
            location = get_hf_file_metadata(url, timeout=30).location
            headers = build_hf_headers() if urlsplit(location).netloc == urlsplit(url).netloc else {}
            with _Unbuffered(to, "ab") as file:
                begun = file.tell()
                http_get(
                    location, file, resume_size=begun, headers=headers, expected_size=size, displayed_filename=path
                )
