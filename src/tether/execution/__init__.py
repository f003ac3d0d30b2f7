"""Where things run: groups of worker processes, one for each device, and handles that stand for what is in them.

`ray_group` starts the processes in a `cluster`; both are imported only where they are used, since Ray is an extra.
"""

from tether.execution.handles import Replicas, ShardedEngine, ShardedSampler
from tether.execution.transfers import Transfers
from tether.execution.weights import StoredWeights
from tether.execution.worker import Group

__all__ = [
    "Group",
    "Replicas",
    "ShardedEngine",
    "ShardedSampler",
    "StoredWeights",
    "Transfers",
    "cluster",
    "control",
    "ray_group",
]
