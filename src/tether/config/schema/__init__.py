"""The schema: one class per section, one field per key, and under each field its documentation.

Marks in a field's annotation (`section`) say when a key acts, what it inherits and which values are refused.
"""

from tether.config.schema.actor import ActorConfig, RefConfig
from tether.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from tether.config.schema.critic import CriticConfig
from tether.config.schema.data import DataConfig
from tether.config.schema.engine import ShardConfig, TrainedFsdpConfig
from tether.config.schema.env import FLOW_TYPES, VLA_TYPES, EvalEnvConfig, TrainEnvConfig
from tether.config.schema.model import ModelConfig
from tether.config.schema.optim import OptimConfig
from tether.config.schema.reward import ScoringModelConfig, ScoringServerConfig
from tether.config.schema.rollout import SERVERS, RolloutConfig
from tether.config.schema.trainer import TrainerConfig

__all__ = [
    "FLOW_TYPES",
    "SERVERS",
    "VLA_TYPES",
    "ActorConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "DataConfig",
    "EvalEnvConfig",
    "ModelConfig",
    "OptimConfig",
    "RefConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "ScoringModelConfig",
    "ScoringServerConfig",
    "ShardConfig",
    "TrainEnvConfig",
    "TrainedFsdpConfig",
    "TrainerConfig",
    "section",
]
