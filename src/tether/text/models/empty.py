"""Builds a transformers model without its weights: class, config and weight names of a model that is sharded
elsewhere."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from tether.text.models.critic import empty_critic
from tether.text.models.layers import use_tether_attention
from tether.text.models.packing_check import disable_dropout


def empty_model(path: Path | str, config: PreTrainedConfig, *, critic: bool = False) -> PreTrainedModel:
    """Return the model of a directory as `load_causal_lm` or `load_critic` would load it, with weights on the meta
    device.

    Raises:
        ValueError: a critic of a family that has no class with a scalar head.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = empty_critic(config) if critic else AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if not any(True for _ in module.children()) and any(True for _ in module.buffers(recurse=False)):
            made = type(module)(config).__dict__  # with rotary frequencies, which no file has
            module.__dict__.update({name: value for name, value in made.items() if name != "_parameters"})
    if model.can_generate():
        with suppress(OSError):  # without such a file the generation config derived from the model's config remains
            model.generation_config = GenerationConfig.from_pretrained(path)
    disable_dropout(model)
    use_tether_attention(model)
    return model.eval()
