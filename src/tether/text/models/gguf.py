"""Loads a GGUF file as an ordinary transformers model and tokenizer: dequantized, trainable, and savable.

Needs the packages gguf and accelerate (extra ``quickstart``); transformers says so where they lack. It passes over what
it does not know of a file, and draws missing weights at random: both are refused here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from tether.runtime.disk import reading
from tether.runtime.install import pip_install

FIX = "Copy the file again"


def load_gguf_model(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the causal LM of a GGUF file, with every weight dequantized.

    transformers marks what it loads from GGUF as quantized and refuses to save it, so the weights move into a model
    built from the same config without that mark. Its ``generation_config`` names the end-of-sequence ids.

    Raises:
        ValueError: the file is one of several, lacks weights, or has tensors or rotary scaling that are not read.
    """
    with reading(file, FIX):
        architecture, names = _read_names(file)
        both: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
        )
        loaded, report = both
    _check_tensors(file, architecture, names, loaded, sorted(report["missing_keys"]))
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten, so preserve the random state
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.name_or_path = str(file)  # transformers names the folder
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    return model


def _read_names(file: Path) -> tuple[str, list[str]]:
    """Return the architecture and the names of the tensors of a file; refuse one of several, and rotary scaling."""
    try:
        from gguf import GGUFReader  # an extra
    except ModuleNotFoundError as error:
        raise ValueError(f"{file}: a GGUF file needs the package gguf. Run: {pip_install('quickstart')}") from error
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
    return values["general.architecture"], [tensor.name for tensor in reader.tensors]


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
