"""Where downloads are kept."""

from __future__ import annotations

import os
from pathlib import Path


def uses_modelscope() -> bool:
    """Whether names of models are ModelScope's: verl's ``VERL_USE_MODELSCOPE``."""
    return os.environ.get("VERL_USE_MODELSCOPE", "").lower() in ("1", "true", "yes")


def cache_dir() -> Path:
    """Folder of downloaded models: ``$TETHER_CACHE``, or ``tether`` in the user's cache folder."""
    if chosen := os.environ.get("TETHER_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tether"
