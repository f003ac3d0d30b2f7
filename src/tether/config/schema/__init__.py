"""The schema: one class per section, one field per key, and each key's documentation below its field.

`root` lists the sections. Sections that several packages read are here, all others in the `config` module of their
package. Marks in a field's annotation (`section`) say when a key has an effect, what it inherits and which values are
refused.
"""

from tether.config.schema.actor import ActorConfig, RefConfig
from tether.config.schema.algorithm import AlgorithmConfig, FilterGroupsConfig, RolloutCorrectionConfig
from tether.config.schema.critic import CriticConfig
from tether.config.schema.engine import ShardConfig, TrainedFsdpConfig
from tether.config.schema.model import BackboneConfig, CriticModelConfig, ModelConfig
from tether.config.schema.optim import OptimConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "BackboneConfig",
    "CriticConfig",
    "CriticModelConfig",
    "FilterGroupsConfig",
    "ModelConfig",
    "OptimConfig",
    "RefConfig",
    "RolloutCorrectionConfig",
    "ShardConfig",
    "TrainedFsdpConfig",
    "section",
]
