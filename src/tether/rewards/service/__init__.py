"""Services that score responses, with a common interface (`Rewards`).

In the processes of a `RewardPool` each call has a deadline, and a process that exceeds it is killed. `BatchedRewards`
calls a function once for all responses. `LocalRewards` calls a function in this process, `ModelRewards` a model in this
process, `RemoteRewards` queries a server, and `CombinedRewards` returns the weighted sum of several rewards.
"""

from tether.rewards.service.batched import BatchedRewards
from tether.rewards.service.classifier import ServedRewardModel
from tether.rewards.service.combined import CombinedRewards, Rewards, WeightedReward
from tether.rewards.service.endpoint import Endpoint
from tether.rewards.service.learned import ModelRewards
from tether.rewards.service.local import LocalRewards
from tether.rewards.service.pool import RewardPool
from tether.rewards.service.remote import RemoteRewards

__all__ = [
    "BatchedRewards",
    "CombinedRewards",
    "Endpoint",
    "LocalRewards",
    "ModelRewards",
    "RemoteRewards",
    "RewardPool",
    "Rewards",
    "ServedRewardModel",
    "WeightedReward",
]
