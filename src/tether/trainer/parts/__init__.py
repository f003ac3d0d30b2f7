"""Steps of the training loop that a configuration enables.

The loop calls each through a small protocol; assembly creates those that a run has.
"""

from tether.trainer.parts.alarms import Alarms
from tether.trainer.parts.best_evaluation import BestEvaluation
from tether.trainer.parts.collector import Collector, ScoredResponses
from tether.trainer.parts.critic_warmup import CriticWarmup
from tether.trainer.parts.dynamic_sampling import DynamicSampling
from tether.trainer.parts.greedy_baseline import GreedyBaseline
from tether.trainer.parts.mismatch import MismatchAlarm, mismatch_tolerance
from tether.trainer.parts.pf_ppo import PolicyFiltration
from tether.trainer.parts.profiler import StepProfiler
from tether.trainer.parts.reward_components import RewardComponents
from tether.trainer.parts.reward_shaping import KLReward, LengthPenalty, RewardShaping
from tether.trainer.parts.rollback import Rollbacks
from tether.trainer.parts.rollout_correction import RolloutCorrection

__all__ = [
    "Alarms",
    "BestEvaluation",
    "Collector",
    "CriticWarmup",
    "DynamicSampling",
    "GreedyBaseline",
    "KLReward",
    "LengthPenalty",
    "MismatchAlarm",
    "PolicyFiltration",
    "RewardComponents",
    "RewardShaping",
    "Rollbacks",
    "RolloutCorrection",
    "ScoredResponses",
    "StepProfiler",
    "mismatch_tolerance",
]
