"""Loads a GGUF file as an ordinary transformers model and tokenizer: dequantized, trainable, and savable.

It needs the packages gguf and accelerate (extra ``quickstart``); transformers reports if they are missing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tether.runtime.disk import reading

FIX = "Copy the file again"


def load_gguf_model(file: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the causal LM of a GGUF file, with every weight dequantized.

    transformers marks what it loads from GGUF as quantized and refuses to save it, so the weights move into a model
    built from the same config without that mark. Its ``generation_config`` names the end-of-sequence ids.
    """
    with reading(file, FIX):
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten, so preserve the random state
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    return model


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
