"""Loading of models and engines onto devices."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tether.text.building.number_formats import DTYPES, number_format
from tether.text.models.load import load_causal_lm
from tether.text.sampling import NativeEngine, eos_token_ids


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device; the type of transformers' own `to` hides its argument."""
    nn.Module.to(model, device)
    return model


def load_engine(
    model: Path | str, device: torch.device, dtype: str, *, trust_remote_code: bool = False
) -> NativeEngine:
    """Load an engine that samples from a model on disk."""
    formats = DTYPES[number_format(dtype, device)]
    loaded = on_device(load_causal_lm(model, dtype=formats, trust_remote_code=trust_remote_code), device)
    return NativeEngine(loaded, eos_token_ids=eos_token_ids(loaded))
