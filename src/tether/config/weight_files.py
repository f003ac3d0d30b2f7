"""Models of a run whose initial weights come from a Megatron checkpoint instead of ``model.path``."""

from __future__ import annotations

from pathlib import Path

from tether.config.devices import models_of
from tether.config.schema.engine import MegatronConfig, RefMegatronConfig
from tether.config.schema.root import RunConfig


def stored_weights(config: RunConfig) -> dict[str, tuple[str, Path]]:
    """Return, for each such model, the key and the directory of its checkpoint."""
    settings = config.actor_rollout_ref
    sections: dict[str, tuple[str, MegatronConfig | RefMegatronConfig]] = {
        "actor": ("actor_rollout_ref.actor", settings.actor.megatron),
        "reference": ("actor_rollout_ref.ref", settings.ref.megatron),
        "critic": ("critic", config.critic.megatron),
    }
    return {
        model: (f"{section}.megatron.dist_checkpointing_path", Path(sizes.dist_checkpointing_path).expanduser())
        for model, (section, sizes) in sections.items()
        if model in models_of(config) and sizes.use_dist_checkpointing and sizes.dist_checkpointing_path
    }


def reads_weights(config: RunConfig, *models: str) -> bool:
    """Whether one of these models loads its initial weights from ``model.path``."""
    return bool((models_of(config) & {*models}) - stored_weights(config).keys())
