"""The whole tree."""

from __future__ import annotations

from tether.config.schema.actor import ActorConfig, RefConfig
from tether.config.schema.algorithm import AlgorithmConfig
from tether.config.schema.critic import CriticConfig
from tether.config.schema.data import DataConfig
from tether.config.schema.env import EnvConfig, PolicyConfig
from tether.config.schema.model import ModelConfig
from tether.config.schema.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from tether.config.schema.rollout import RolloutConfig
from tether.config.schema.section import Positive, Section
from tether.config.schema.trainer import GlobalProfilerConfig, TrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy: its weights, its update, its reference, its sampling."""

    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig
    hybrid_engine: bool = True
    """Train and sample on the same devices."""
    nccl_timeout: Positive = 600
    """Seconds until a collective gives up."""


class RunConfig(Section):
    """Everything that a run is told. Made by `load_config` only, which fills in defaults and inheritance."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    algorithm: AlgorithmConfig
    custom_reward_function: CustomRewardFunctionConfig
    reward_model: RewardModelConfig
    reward_manager: RewardManagerConfig
    trainer: TrainerConfig
    env: EnvConfig
    policy: PolicyConfig
    global_profiler: GlobalProfilerConfig
