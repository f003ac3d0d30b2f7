"""`tether model list`, which loads no model."""

from __future__ import annotations

from tether.models.language.model_path import KNOWN_MODELS
from tether.runtime.cache import cache_dir


def list_models() -> None:
    """Print the known models, and whether they are in the cache."""
    for name, model in KNOWN_MODELS.items():
        here = "in the cache" if (cache_dir() / name).exists() else "not pulled yet"
        print(f"{name:20} {here:16} {model.requirement}, {model.size_mb} MB")
