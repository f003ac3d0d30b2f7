"""The processes that run reward functions: each call has a deadline, and a call that exceeds it is killed.

`Rewards` is what the training loop knows: the processes of a `RewardPool`, `LocalRewards` for a function that is an
object of this process, or `ModelRewards` for a learned reward model.
"""

from tether.rewards.service.learned import ModelRewards, Rewards
from tether.rewards.service.local import LocalRewards
from tether.rewards.service.pool import RewardPool

__all__ = ["LocalRewards", "ModelRewards", "RewardPool", "Rewards"]
