"""Rank and scale of the LoRA adapter that a model starts from, for runs that do not set a rank."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tether.config.loading.settings import Settings

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the description file in an adapter's folder, as peft writes it."""


def take_from_adapters(settings: Settings) -> None:
    """Set ``lora_rank`` and ``lora_alpha`` of models that start from an adapter to the adapter's.

    A configured rank of 0, which verl's printed configurations contain in this case, counts as unset, and so does the
    alpha beside it. A folder that is not an adapter, or a value that differs from the adapter's, is reported later, by
    the check of the run's files.
    """
    for model in ("actor_rollout_ref.model", "critic.model"):
        rank, path = settings.get(f"{model}.lora_rank"), settings.get(f"{model}.lora_adapter_path")
        if path is None or not isinstance(path.value, str):
            continue
        file, saved = Path(path.value).expanduser() / ADAPTER_CONFIG, None
        with suppress(OSError, ValueError):
            saved = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            continue
        alpha = settings.get(f"{model}.lora_alpha")
        for key, name, is_given in (
            ("lora_rank", "r", rank is not None and rank.value),
            ("lora_alpha", "lora_alpha", alpha is not None and (rank is None or rank.value)),
        ):
            if not is_given and isinstance(saved.get(name), int):
                settings[f"{model}.{key}"] = replace(path, value=saved[name], source=f"{file}")
