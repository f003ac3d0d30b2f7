"""A model as a plain Hugging Face directory, written by one process or in parts by several.

A part is a directory of its own with the weights that its process has; the others are on the meta device there.
`join_parts` makes one directory of them. Ranks write at the same time, and none needs the memory for all weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict, revert_weight_conversion

INDEX = "model.safetensors.index.json"


def write_model(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a model, or the part of it that is not on the meta device.

    Args:
        model: whose class and config they are.
        folder: for all of it.
        state: its weights; None: its own.
    """
    weights = dict(model.state_dict() if state is None else state)
    here = {name: value for name, value in weights.items() if value.device.type != "meta"}
    if len(here) == len(weights):
        model.save_pretrained(folder, state_dict=weights)
        return
    model.save_pretrained(folder, state_dict={})  # its config
    folder.mkdir(parents=True, exist_ok=True)
    named = revert_weight_conversion(model, remove_tied_weights_from_state_dict(here, model))
    if named:
        tensors = {name: value.contiguous() for name, value in named.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def join_parts(parts: Sequence[Path], folder: Path) -> None:
    """Make one directory of parts, whose files are moved; what is no weight is the first one's."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [file for part in parts for file in sorted(part.glob("model*.safetensors"))]
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
    else:
        _with_index(files, folder)
    for file in parts[0].iterdir():
        if file.name != INDEX:
            file.rename(folder / file.name)


def _with_index(files: Sequence[Path], folder: Path) -> None:
    places: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        with safe_open(file, "pt") as opened:
            places |= dict.fromkeys(opened.keys(), name)
        size += file.stat().st_size
        file.rename(folder / name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
