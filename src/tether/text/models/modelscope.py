"""Models of ModelScope, through its own client (extra ``modelscope``), which resumes downloads and checks hashes."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from urllib.parse import quote

from modelscope import snapshot_download
from modelscope.hub.api import HubApi
from modelscope_hub.errors import NetworkError, ServerError

from tether.runtime.disk import writing
from tether.runtime.modelscope import modelscope_errors

logger = logging.getLogger(__name__)

FIX = (
    "correct the name or the connection (MODELSCOPE_ENDPOINT), give the path of a model's directory, or, for the "
    "Hugging Face hub, write no modelscope: before the name and unset VERL_USE_MODELSCOPE."
)


@cache
def modelscope_directory(name: str, cache_dir: Path) -> Path:
    """Download a model, or its missing files; a process asks ModelScope only once.

    If ModelScope cannot be reached, a complete earlier download is used, with a warning.

    Args:
        name: ``owner/name``.
        cache_dir: tether's cache; MODELSCOPE_CACHE takes precedence.

    Raises:
        ValueError: ModelScope does not have the model, cannot be reached, or the disk is full.
    """
    with writing(cache_dir, "make room, or name another folder by TETHER_CACHE"), modelscope_errors(f"{name}:", FIX):
        try:
            folder = Path(snapshot_download(name, cache_dir=str(cache_dir / "modelscope")))
        except (NetworkError, ServerError) as error:
            complete = _downloaded(name, cache_dir)
            if complete is None:
                raise
            logger.warning("%s: ModelScope cannot be reached (%s); %s is used", name, error.message, complete)
            return complete
        _note_download(name, cache_dir, folder)
    return folder


@cache
def check_on_modelscope(name: str, cache_dir: Path) -> None:
    """Query the list of a model's files, unless the model is in the cache; nothing is downloaded.

    Raises:
        ValueError: as for `modelscope_directory`, or the repository has no config.json.
    """
    if _downloaded(name, cache_dir):
        return
    with modelscope_errors(f"{name}:", FIX):
        files = HubApi().get_model_files(name, recursive=False)
    if "config.json" not in {file["Path"] for file in files}:
        raise ValueError(f"{name}: has no config.json on ModelScope, so it is no model. Correct the name.")


def _note(name: str, cache_dir: Path) -> Path:
    return cache_dir / "modelscope" / f"{quote(name, safe='')}.json"


def _note_download(name: str, cache_dir: Path, folder: Path) -> None:
    """Record the files of a complete download, because the client cannot tell it from an interrupted one."""
    note = _note(name, cache_dir)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"folder": str(folder), "files": _files(folder)}))


def _downloaded(name: str, cache_dir: Path) -> Path | None:
    """Return the folder of a complete download, if its files are unchanged."""
    try:
        noted = json.loads(_note(name, cache_dir).read_text())
        folder = Path(noted["folder"])
        files = _files(folder)
        return folder if files | noted["files"] == files else None
    except (OSError, ValueError, LookupError, TypeError):  # there is no record, or it is incomplete
        return None


def _files(folder: Path) -> dict[str, list[int]]:
    """Return size and modification time of each file; size alone cannot detect a replaced or incomplete file."""
    states = {str(file.relative_to(folder)): file.stat() for file in folder.rglob("*") if file.is_file()}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in sorted(states.items())}
