"""Converts a GGUF file, once, to an ordinary Hugging Face directory: dequantized, trainable, and savable.

It needs the packages gguf and accelerate (extra ``quickstart``). transformers ignores parts of a file that it does not
support, and initialises missing weights at random; this module refuses both.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from tether.checkpoints import is_disk_full, sha256_of
from tether.runtime.disk import follow_umask, reading, writing
from tether.runtime.file_lock import locked
from tether.runtime.install import pip_install
from tether.runtime.package_warnings import quiet_fork
from tether.text.models.save import save_tokenizer, write_model

FIX, ROOM = "Copy the file again", "Make room, or name another folder by TETHER_CACHE."
MAX_ROUNDING = 0.3
"""Maximum relative distance between two quantizations of the same matrix: it is 0.05 for 5 bits, about 0.25 for 2."""


def converted_gguf(file: Path, cache_dir: Path, *, say: Callable[[str], None]) -> Path:
    """Return the cached directory of a GGUF file's model, named by the hash of the file; convert the file if necessary.

    Args:
        file: the GGUF file.
        cache_dir: directory of models; the converted ones are in ``gguf``.
        say: called with a line if the file is converted, or if another process is converting it.

    Raises:
        ValueError: as for `load_gguf_model`, or the disk is full.
    """
    with reading(file, FIX):
        state = file.stat()
        target = cache_dir / "gguf" / _hash(file, state.st_size, state.st_mtime_ns)
    if target.is_dir():
        return target
    with (
        writing(target, ROOM),
        locked(target.with_suffix(".lock"), f"another process converts {file}; waiting for it", say),
    ):
        if not target.is_dir():
            say(f"{file}: converting it, once, to {target}")
            convert_gguf(file, target)
    return target


@cache
def _hash(file: Path, size: int, changed: int) -> str:
    """Return the hash of a file; `size` and modification time are only keys of the cache."""
    return sha256_of([file])[0]


def convert_gguf(file: Path, directory: Path) -> None:
    """Write a GGUF file's model and tokenizer as a Hugging Face directory, which appears once it is complete.

    The weights are stored in float32: a dequantized value is a 16-bit scale times a small integer plus a 16-bit offset,
    which needs more than bfloat16's 8 bits of mantissa, so bfloat16 would round almost every weight.

    Raises:
        ValueError: as for `load_gguf_model`, or the disk is full.
    """
    shows_progress = is_progress_bar_enabled()
    disable_progress_bar()
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # transformers parses the metadata again for the tokenizer, which takes seconds in Python, so it runs in another
        # process.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            with quiet_fork():
                tokenizer = pool.submit(_convert_tokenizer, file, partial)
            write_model(load_gguf_model(file), partial)
            tokenizer.result()
        follow_umask(partial, like=partial / "config.json")
        partial.rename(directory)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error):
            raise ValueError(f"{directory}: cannot be written (the disk is full). {ROOM}") from error
        raise
    finally:
        if shows_progress:
            enable_progress_bar()


def _convert_tokenizer(file: Path, directory: Path) -> None:
    save_tokenizer(load_gguf_tokenizer(file), directory)


def load_gguf_model(file: Path) -> PreTrainedModel:
    """Load the causal LM of a GGUF file, with every weight dequantized.

    transformers marks models loaded from GGUF as quantized and refuses to save them, so the weights move into a model
    built from the same config without that mark. Its ``generation_config`` has the end-of-sequence ids. If the file
    stores the embedding a second time as the output layer, with another quantization, the two become one tied weight
    again.

    Raises:
        ValueError: the file is one of several, lacks weights, or has an architecture, quantization, tensors or rotary
            scaling that are not supported.
    """
    with reading(file, FIX):
        architecture, tensors = _read_tensors(file)
        loaded, report = _load(file, architecture)
    _check_tensors(file, architecture, list(tensors), loaded, sorted(report["missing_keys"]))
    config, weights = loaded.config, loaded.state_dict()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    _tie(loaded, weights, tensors)
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten, so preserve the random state
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig.from_model_config(config)
    return model


def _load(file: Path, architecture: str) -> Any:
    """Return the model, and transformers' report on loading it."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    except ValueError as error:
        if "architecture" not in str(error):
            raise
        raise ValueError(
            f"{file}: its architecture {architecture} is not read from GGUF by the installed transformers. Name the "
            "model's directory of safetensors."
        ) from error


def _tie(model: PreTrainedModel, weights: dict[str, torch.Tensor], bits: Mapping[str, float]) -> None:
    """Tie the output layer to the embedding in the config and in `weights` if they are the same matrix, quantized
    twice.

    The version with more bits per weight is used for both. Matrices that were trained separately differ far more.
    """
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    output = model.get_output_embeddings()
    if model.config.tie_word_embeddings or output is None:
        return
    embedding_name, output_name = (names[id(layer.weight)] for layer in (model.get_input_embeddings(), output))
    first, second = weights[embedding_name], weights[output_name]
    if first.shape != second.shape or (first - second).norm() > MAX_ROUNDING * second.norm():
        return
    more_precise = first if bits["token_embd.weight"] > bits["output.weight"] else second
    weights[embedding_name] = weights[output_name] = more_precise
    model.config.tie_word_embeddings = True


def _read_tensors(file: Path) -> tuple[str, dict[str, float]]:
    """Return the architecture of a file, and the bits per weight of its tensors; refuse what is not supported."""
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ValueError(
            f"{file}: a GGUF file needs the package {' and '.join(missing)}. Run: {pip_install('quickstart')}"
        )
    from gguf import GGUFReader  # an extra

    reader = GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if int(values.get("split.count", 1)) > 1:
        raise ValueError(
            f"{file}: is one of {values['split.count']} files of a model. Merge them (llama-gguf-split --merge FIRST "
            "OUT), or name the model's directory of safetensors."
        )
    rope = {name.split(".", 1)[1]: value for name, value in values.items() if ".rope." in name}
    factor = rope.get("rope.scaling.factor", rope.get("rope.scale_linear"))
    kind = rope.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind != "none" and factor != 1.0:
        keys = {name: value for name, value in rope.items() if name.startswith("rope.scal")}
        raise ValueError(
            f"{file}: scales its rotary positions ({keys}), which is not read from GGUF. Name the model's directory of "
            "safetensors."
        )
    _check_quantization(file, reader.tensors)
    return values["general.architecture"], {
        tensor.name: 8 * tensor.n_bytes / tensor.n_elements for tensor in reader.tensors
    }


def _check_quantization(file: Path, tensors: Sequence[Any]) -> None:
    from gguf import dequantize

    for kind, tensor in {tensor.tensor_type: tensor for tensor in tensors}.items():
        try:
            dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{file}: {tensor.name} is quantized as {kind.name}, which the package gguf does not dequantize. Name "
                "a file of another quantization (Q8_0, Q4_K_M), or the model's directory of safetensors."
            ) from error


def _check_tensors(file: Path, architecture: str, names: list[str], model: PreTrainedModel, missing: list[str]) -> None:
    if missing:
        raise ValueError(
            f"{file}: lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}. Download it again, "
            "or name the model's directory of safetensors."
        )
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = {name.removesuffix(".weight") for name in get_gguf_hf_weights_map(model, processor)}
    unread = [name for name in names if name.removesuffix(".weight") not in known]
    if unread:
        raise ValueError(
            f"{file}: {len(unread)} of its tensors are not read, such as {unread[0]} (rope_freqs and rope_factors "
            "scale rotary positions). Name the model's directory of safetensors."
        )


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file, with its chat template and context length."""
    with reading(file, FIX):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        metadata = load_gguf_checkpoint(str(file), return_tensors=False)
    if metadata["tokenizer"].get("pre_tokenizer_type") == "smollm":
        # This family splits digits before the byte-level split. transformers drops that step, and then encodes the
        # spaces before a number differently than in training ("a  1": one token, not two).
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    context = metadata["config"].get("max_position_embeddings")
    if context is not None:
        tokenizer.model_max_length = context
    return tokenizer
