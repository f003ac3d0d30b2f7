"""Downloads datasets of ModelScope with its client (extra ``modelscope``)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from modelscope_hub import HubApi

from tether.integrations.hubs.hub import Listing, RemoteFile, asked_for
from tether.runtime.hubs import MODELSCOPE
from tether.runtime.modelscope import modelscope_errors

DATASET = "dataset"
NEWEST = "master"
FIX = (
    "the same command goes on where it stopped; --repository names another dataset, and MODELSCOPE_ENDPOINT another hub"
)


class ModelScope:
    """ModelScope. It reports no commits, so a revision is a branch and a hash of the listing."""

    def listing_of(self, repository: str, revision: str | None) -> Listing:
        branch = revision or NEWEST
        with modelscope_errors(asked_for(repository, revision), FIX):
            listed = HubApi().list_repo_files(repository.removeprefix(MODELSCOPE), DATASET, revision=branch)
        files = {file.path: RemoteFile(file.size or 0, file.sha256) for file in listed if file.type != "tree"}
        content = json.dumps({path: [file.size, file.sha256] for path, file in sorted(files.items())})
        return Listing(f"{branch}@{hashlib.sha256(content.encode()).hexdigest()[:12]}", files)

    def fetch(self, repository: str, listing: Listing, path: str, to: Path) -> None:
        folder = to.with_name(f"{to.name}.modelscope")  # keeps a partial download for the next call
        branch = listing.revision.rpartition("@")[0]
        size = listing.files[path].size
        if any(file.is_file() and file.stat().st_size > size for file in folder.rglob("*")):
            shutil.rmtree(folder)  # a partial download of a different file, or a damaged one
        with modelscope_errors(f"{repository}/{path}:", FIX):
            file = HubApi().download_file(
                repository.removeprefix(MODELSCOPE),
                DATASET,
                path,
                revision=branch,
                local_dir=folder,
                file_size=size,
            )
        file.replace(to)
        shutil.rmtree(folder)
