"""Components of the loop for control policies: rollouts in environments, rewards, advantages, evaluation."""

from tether.trainer.control.advantages import CRITIC, ControlAdvantages, LearnedDecisions
from tether.trainer.control.rewards import EnvRewards, RewardScaler
from tether.trainer.control.rollouts import POLICY, ControlEvaluation, EnvRollouts, OpenVideo, StartStates

__all__ = [
    "CRITIC",
    "POLICY",
    "ControlAdvantages",
    "ControlEvaluation",
    "EnvRewards",
    "EnvRollouts",
    "LearnedDecisions",
    "OpenVideo",
    "RewardScaler",
    "StartStates",
    "preflight",
]
