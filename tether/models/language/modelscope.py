"""Models of ModelScope, through its own client (extra ``modelscope``), which resumes and checks hashes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from modelscope import snapshot_download
from modelscope.hub.api import HubApi
from modelscope_hub.errors import HubError

from tether.runtime.disk import writing
from tether.runtime.modelscope import asking_modelscope

FIX = (
    "correct the name or the connection (MODELSCOPE_ENDPOINT), give the path of a model's directory, or unset "
    "VERL_USE_MODELSCOPE for the Hugging Face hub."
)


@cache
def modelscope_directory(name: str, cache_dir: Path) -> Path:
    """Download a model, or what is missing of it; asked once in a process.

    Args:
        name: ``owner/name``.
        cache_dir: of tether; MODELSCOPE_CACHE wins.

    Raises:
        ValueError: ModelScope does not have it, or cannot be reached, or the disk is full.
    """
    with writing(cache_dir, "make room, or name another folder by TETHER_CACHE"), asking_modelscope(f"{name}:", FIX):
        return Path(snapshot_download(name, cache_dir=str(cache_dir / "modelscope")))


def check_on_modelscope(name: str, cache_dir: Path) -> None:
    """Ask for the list of a model's files, unless it is in the cache; nothing is downloaded.

    Raises:
        ValueError: as `modelscope_directory`.
    """
    try:
        snapshot_download(name, cache_dir=str(cache_dir / "modelscope"), local_files_only=True)
    except (HubError, OSError, ValueError):
        with asking_modelscope(f"{name}:", FIX):
            HubApi().get_model_files(name, recursive=False)
