"""Services that score responses, by one set of methods (`Rewards`): processes, threads that wait for a server, a model.

In the processes of a `RewardPool` each call has a deadline, and a call that exceeds it is killed; `BatchedRewards`
calls a function once for all responses. `LocalRewards` calls a function that is an object of this process,
`ModelRewards` a model of it, `RemoteRewards` asks a server, and `CombinedRewards` adds several of them up.
"""

from tether.rewards.service.batched import BatchedRewards
from tether.rewards.service.classifier import ServedRewardModel
from tether.rewards.service.combined import CombinedRewards, Part, Rewards
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
    "Part",
    "RemoteRewards",
    "RewardPool",
    "Rewards",
    "ServedRewardModel",
]
