"""The processes that run reward functions: each call has a deadline, and a call that exceeds it is killed.

`Rewards` is the protocol that the training loop knows; `LocalRewards` serves it with the processes of a `RewardPool`.
"""

from tether.rewards.service.local import LocalRewards, Rewards
from tether.rewards.service.pool import RewardPool

__all__ = ["LocalRewards", "RewardPool", "Rewards"]
