"""The configuration of a run, with verl's key names; it is checked completely before heavy modules are imported.

::

    loaded = load_config(Path("run.yaml"), ["trainer.total_epochs=2", "critic.optim.lr=1e-5"])
    loaded.config.trainer.total_epochs  # 2
    loaded.sources["trainer.total_epochs"]  # "command line"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.config.adapters import ADAPTER_CONFIG
    from tether.config.changes import DRAW, NO_DRAW, changes_since, check_resumable, minimal_tree, saved_values
    from tether.config.devices import device_count, models_of, placed, pools, uses_megatron
    from tether.config.explanations import explain, format_inheritance, format_tree
    from tether.config.integrations import integration_config
    from tether.config.keys import values_of, with_values
    from tether.config.kl import (
        asks_reference,
        full_kl_in_loss,
        full_kl_in_reward,
        has_reference,
        local_references,
        reference_is_policy,
        reference_models,
        reference_runs_with_actor,
        served_teachers,
    )
    from tether.config.loading.load import LoadedConfig, for_environment, load_config
    from tether.config.loading.overrides import Override
    from tether.config.loading.typos import key_written_as
    from tether.config.problems import ConfigError, Problem
    from tether.config.router_replay import replay_of
    from tether.config.schema.root import ActorRolloutRefConfig, RunConfig
    from tether.config.schema.section import Section
    from tether.config.secrets import has_secrets, masked_command
    from tether.config.support.live_keys import live_keys
    from tether.config.weight_files import reads_weights, stored_weights

__all__ = [
    "ADAPTER_CONFIG",
    "DRAW",
    "NO_DRAW",
    "ActorRolloutRefConfig",
    "ConfigError",
    "LoadedConfig",
    "Override",
    "Problem",
    "RunConfig",
    "Section",
    "asks_reference",
    "changes_since",
    "check_resumable",
    "device_count",
    "explain",
    "explanations",
    "for_environment",
    "format_inheritance",
    "format_tree",
    "full_kl_in_loss",
    "full_kl_in_reward",
    "has_reference",
    "has_secrets",
    "integration_config",
    "key_written_as",
    "live_keys",
    "load_config",
    "local_references",
    "masked_command",
    "minimal_tree",
    "models_of",
    "placed",
    "pools",
    "reads_weights",
    "reference_is_policy",
    "reference_models",
    "reference_runs_with_actor",
    "replay_of",
    "saved_values",
    "schema",
    "served_teachers",
    "stored_weights",
    "support",
    "uses_megatron",
    "values_of",
    "with_values",
]

# A section outside of this package imports its base class from here, and this package lists the section. Names are
# therefore resolved lazily, so that either module can be imported first.
_FOUND_IN = {
    name: module
    for module, names in {
        "tether.config.adapters": ("ADAPTER_CONFIG",),
        "tether.config.changes": (
            "DRAW",
            "NO_DRAW",
            "changes_since",
            "check_resumable",
            "minimal_tree",
            "saved_values",
        ),
        "tether.config.devices": ("device_count", "models_of", "placed", "pools", "uses_megatron"),
        "tether.config.explanations": ("explain", "format_inheritance", "format_tree"),
        "tether.config.integrations": ("integration_config",),
        "tether.config.keys": ("values_of", "with_values"),
        "tether.config.kl": (
            "asks_reference",
            "full_kl_in_loss",
            "full_kl_in_reward",
            "has_reference",
            "local_references",
            "reference_is_policy",
            "reference_models",
            "reference_runs_with_actor",
            "served_teachers",
        ),
        "tether.config.loading.load": ("LoadedConfig", "for_environment", "load_config"),
        "tether.config.loading.overrides": ("Override",),
        "tether.config.loading.typos": ("key_written_as",),
        "tether.config.problems": ("ConfigError", "Problem"),
        "tether.config.router_replay": ("replay_of",),
        "tether.config.schema.root": ("ActorRolloutRefConfig", "RunConfig"),
        "tether.config.schema.section": ("Section",),
        "tether.config.secrets": ("has_secrets", "masked_command"),
        "tether.config.weight_files": ("reads_weights", "stored_weights"),
        "tether.config.support.live_keys": ("live_keys",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FOUND_IN[name]), name)
