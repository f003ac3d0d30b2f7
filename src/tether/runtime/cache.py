"""The folder of downloads."""

from __future__ import annotations

import os
from pathlib import Path

OTHER_CACHE = "Name another folder by TETHER_CACHE"
"""Advice for a folder that cannot be written."""


def cache_dir() -> Path:
    """Return the folder of downloads: ``$TETHER_CACHE``, or ``tether`` in the user's cache folder."""
    if chosen := os.environ.get("TETHER_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tether"
