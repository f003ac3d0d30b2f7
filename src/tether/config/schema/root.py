"""The root of the schema, which lists the sections of all packages."""

from __future__ import annotations

from typing import Annotated

from tether.config.schema.actor import ActorConfig, RefConfig
from tether.config.schema.algorithm import AlgorithmConfig
from tether.config.schema.critic import CriticConfig
from tether.config.schema.engine import ON_RANKS
from tether.config.schema.model import ModelConfig
from tether.config.schema.section import EMBODIED, EMBODIED_TOO, ActsIf, Options, Positive, Section
from tether.control.envs.config import EnvConfig
from tether.control.policies.config import PolicyConfig
from tether.loop.config import ClusterConfig, RayKwargsConfig, TrainerConfig
from tether.text.data.config import DataConfig, SftConfig
from tether.text.learning.config_distillation import DISTILLS, DistillationConfig
from tether.text.rewards.config import CustomRewardFunctionConfig, RewardModelConfig
from tether.text.sampling.config import RolloutConfig


class ActorRolloutRefConfig(Section):
    """The policy: its weights, its update, its reference, its sampling."""

    model: ModelConfig
    actor: ActorConfig
    ref: Annotated[
        RefConfig,
        ActsIf(
            "actor_rollout_ref.actor.use_kl_loss",
            on=(True,),
            other=ActsIf("algorithm.use_kl_in_reward", on=(True,), other=DISTILLS),
        ),
    ]
    rollout: RolloutConfig
    nccl_timeout: Annotated[Positive, ON_RANKS, EMBODIED_TOO] = 600
    """Timeout in seconds of collective operations between devices."""


class RunConfig(Section):
    """All settings of a run; only `load_config` creates it, with defaults and inherited values."""

    data: DataConfig
    sft: SftConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: Annotated[CriticConfig, ActsIf("critic.enable", on=(True,))]
    algorithm: AlgorithmConfig
    distillation: DistillationConfig
    custom_reward_function: Annotated[CustomRewardFunctionConfig, ActsIf("custom_reward_function.path", off=(None,))]
    reward_model: RewardModelConfig
    trainer: TrainerConfig
    ray_kwargs: RayKwargsConfig
    cluster: ClusterConfig
    env: Annotated[EnvConfig, EMBODIED]
    policy: Annotated[PolicyConfig, EMBODIED]
    integrations: Options
    """Sections of integrations in other packages, by name, for example {coins: {bonus: 2}}. (tether's own key.)"""
