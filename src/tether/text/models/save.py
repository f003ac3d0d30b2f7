"""Saves a model as a plain Hugging Face directory, written by one process or in shards by several.

A shard is a separate directory with the weights of one process; all other weights are on the meta device there.
`join_shards` merges them into one directory. Ranks write in parallel, and none needs memory for all weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import remove_tied_weights_from_state_dict, revert_weight_conversion

INDEX = "model.safetensors.index.json"
_OLDER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""transformers 4's names of rotary settings, for model types where they differ from the usual ones."""
_RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""Settings of model types that transformers 5 renamed -> their names in transformers 4."""


def write_model(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a model with the weights in `state`, by default its own; weights on the meta device are left out."""
    weights = dict(model.state_dict() if state is None else state)
    loaded = {name: value for name, value in weights.items() if value.device.type != "meta"}
    if len(loaded) == len(weights):
        model.save_pretrained(folder, state_dict=weights)
        add_older_names(folder)
        return
    model.save_pretrained(folder, state_dict={})  # only the config, which transformers writes on rank 0 only
    if (folder / "config.json").is_file():
        add_older_names(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = revert_weight_conversion(model, remove_tied_weights_from_state_dict(loaded, model))
    if named:
        tensors = {name: value.contiguous() for name, value in named.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def adapter_folder(folder: Path) -> Path:
    """Return the folder for the adapter of a model that is saved merged: ``adapter`` next to ``actor``, and
    ``critic_adapter`` next to ``critic``."""
    return folder.with_name("adapter" if folder.name == "actor" else f"{folder.name}_adapter")


def add_older_names(folder: Path) -> None:
    """Add settings of config.json that transformers 5 renamed under the names that transformers 4 reads.

    Version 4, which many servers and evaluation tools use, would otherwise silently use its defaults.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text())
    names = _OLDER_NAMES.get(config.get("model_type"), {})
    older = _older_rope(config.get("rope_parameters") or {}, config.get("model_type"))
    older |= {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    config |= {names.get(name, name): value for name, value in older.items()}
    config |= {old: config[new] for new, old in _RENAMED.get(config.get("model_type"), {}).items()}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _older_rope(rope: Mapping[str, Any], model_type: str | None) -> dict[str, object]:
    """Return the rotary settings in the format of transformers 4; empty if it has none for them."""
    if "full_attention" in rope:  # a base frequency for each kind of layer, as in Gemma 3
        local = rope.get("sliding_attention") or {}
        return _older_rope(rope["full_attention"], model_type) | {"rope_local_base_freq": local.get("rope_theta")}
    if "rope_theta" not in rope:
        return {}
    apart = ("rope_theta", "partial_rotary_factor")
    scaling: dict[str, object] = {name: value for name, value in rope.items() if name not in apart}
    if model_type == "phi3" and rope["rope_type"] == "longrope":  # transformers 4 reads exactly these three
        scaling = {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    is_scaled = rope.get("rope_type", "default") != "default" or "mrope_section" in rope
    return {name: rope[name] for name in apart if name in rope} | {"rope_scaling": scaling if is_scaled else None}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer in a form that transformers 4 also reads."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # a dict in transformers 4
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    # Version 4 would add token_type_ids, which generate() refuses, and which GPT-2 silently adds to its inputs.
    config.setdefault("model_input_names", tokenizer.model_input_names)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def join_shards(shards: Sequence[Path], folder: Path) -> None:
    """Merge shards into one directory by moving their files; files other than weights come from the first shard."""
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
