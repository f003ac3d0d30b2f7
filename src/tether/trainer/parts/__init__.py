"""Steps of the training loop that a configuration switches on.

The loop calls each by the methods of a small protocol; assembly decides which ones a run has.
"""

from tether.trainer.parts.alarms import Alarms
from tether.trainer.parts.best_test import BestTest
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
    "BestTest",
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
