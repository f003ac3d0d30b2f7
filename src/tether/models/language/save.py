"""Saves a model as a plain Hugging Face directory, written by one process or in shards by several.

A shard is a separate directory with the weights of one process, in which the other weights are on the meta device.
`join_shards` merges them into one directory. Ranks write in parallel, and none needs the memory for all weights.
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
    """Write a model, or the weights of it that are not on the meta device.

    Args:
        model: the model.
        folder: target folder.
        state: weights to write; None: those of the model.
    """
    weights = dict(model.state_dict() if state is None else state)
    loaded = {name: value for name, value in weights.items() if value.device.type != "meta"}
    if len(loaded) == len(weights):
        model.save_pretrained(folder, state_dict=weights)
        return
    model.save_pretrained(folder, state_dict={})  # only the config
    folder.mkdir(parents=True, exist_ok=True)
    named = revert_weight_conversion(model, remove_tied_weights_from_state_dict(loaded, model))
    if named:
        tensors = {name: value.contiguous() for name, value in named.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def join_shards(shards: Sequence[Path], folder: Path) -> None:
    """Merge shards into one directory by moving their files; other files than weights are those of the first shard."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [file for shard in shards for file in sorted(shard.glob("model*.safetensors"))]
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
    else:
        _with_index(files, folder)
    for file in shards[0].iterdir():
        if file.name != INDEX:
            file.rename(folder / file.name)


def _with_index(files: Sequence[Path], folder: Path) -> None:
    file_of_weight: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        with safe_open(file, "pt") as opened:
            file_of_weight |= dict.fromkeys(opened.keys(), name)
        size += file.stat().st_size
        file.rename(folder / name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of_weight.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
