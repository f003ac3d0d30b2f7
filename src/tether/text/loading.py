"""Loads models and engines onto devices, and decides the dtypes that are ``auto`` in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tether.config import RunConfig, saved_values, values_of
from tether.config.support.live_keys import why_idle
from tether.runtime.machine import computes_in_bfloat16
from tether.text.models.load import load_causal_lm
from tether.text.sampling.engine import NativeEngine, eos_token_ids

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DTYPE_KEYS = (
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.ref.fsdp_config.dtype",
    "actor_rollout_ref.rollout.dtype",
    "critic.model.fsdp_config.dtype",
    "reward_model.model.fsdp_config.dtype",
)


def number_format(name: str, device: torch.device) -> str:
    """Return the configured dtype; for ``auto`` the fastest one that is precise enough for training."""
    if name != "auto":
        return name
    return "bfloat16" if computes_in_bfloat16(device) else "float32"


def decided_formats(config: RunConfig, device: torch.device, checkpoint: Path | None = None) -> dict[str, str]:
    """Return the keys that are ``auto`` with their dtypes: those of the checkpoint, or the fast ones of this
    machine."""
    values = values_of(config)
    saved = (saved_values(checkpoint / "run.yaml") if checkpoint else None) or {}
    return {key: str(saved.get(key) or number_format("auto", device)) for key in DTYPE_KEYS if values[key] == "auto"}


def formats_line(config: RunConfig, decided: Mapping[str, str]) -> list[str]:
    """Return a line about the automatic dtypes, which also names the sections with explicit ones."""
    values = values_of(config)
    acting = [key for key in DTYPE_KEYS if why_idle(key, values) is None]
    auto = [key for key in acting if key in decided]
    if not auto:
        return []
    whose = "" if auto == acting else f" of {' and '.join(key.removesuffix('.dtype') for key in auto)}"
    return [f"computes in {' and '.join(sorted({decided[key] for key in auto}))}, as dtype{whose} is auto"]


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
