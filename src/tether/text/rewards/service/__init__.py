"""Services that score responses, with a common interface (`Rewards`).

In the processes of a `RewardPool` each call has a deadline, and a process that exceeds it is killed. `BatchedRewards`
calls a function once for all responses. `LocalRewards` calls a function in this process, `ModelRewards` a model in this
process, `RemoteRewards` queries a server, and `CombinedRewards` returns the weighted sum of several rewards.
"""

from tether.text.rewards.service.batched import BatchedRewards
from tether.text.rewards.service.classifier import ServedRewardModel
from tether.text.rewards.service.combined import CombinedRewards, WeightedReward
from tether.text.rewards.service.endpoint import Endpoint
from tether.text.rewards.service.learned import ModelRewards
from tether.text.rewards.service.local import LocalRewards
from tether.text.rewards.service.pool import RewardPool
from tether.text.rewards.service.protocol import Rewards
from tether.text.rewards.service.remote import RemoteRewards

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
