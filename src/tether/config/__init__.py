"""The configuration of a run, with verl's key names; all of it is checked before heavy modules are loaded.

::

    loaded = load_config(Path("run.yaml"), ["trainer.total_epochs=2", "critic.optim.lr=1e-5"])
    loaded.config.trainer.total_epochs  # 2
    loaded.sources["trainer.total_epochs"]  # "command line"
"""

from tether.config.changes import DRAW, NO_DRAW, changes_since, check_resumable, minimal_tree, saved_values
from tether.config.devices import device_count, models_of, placed, pools, uses_megatron
from tether.config.explanations import explain, format_inheritance, format_tree
from tether.config.integrations import integration_config
from tether.config.keys import values_of, with_values
from tether.config.kl import asks_reference, full_kl_in_loss, full_kl_in_reward, reference_runs_with_actor
from tether.config.loading.load import LoadedConfig, for_environment, load_config
from tether.config.loading.overrides import Override
from tether.config.loading.typos import key_written_as
from tether.config.problems import ConfigError, Problem
from tether.config.router_replay import replay_of
from tether.config.schema.root import ActorRolloutRefConfig, RunConfig
from tether.config.schema.section import Section
from tether.config.secrets import masked_command
from tether.config.stored_weights import reads_weights, stored_weights
from tether.config.support.live_keys import live_keys

__all__ = [
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
    "integration_config",
    "key_written_as",
    "live_keys",
    "load_config",
    "masked_command",
    "minimal_tree",
    "models_of",
    "placed",
    "pools",
    "reads_weights",
    "reference_runs_with_actor",
    "replay_of",
    "saved_values",
    "schema",
    "stored_weights",
    "support",
    "uses_megatron",
    "values_of",
    "with_values",
]
