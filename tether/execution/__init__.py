"""Where things run: groups of worker processes, one for each device, and handles that stand for what is in them.

`ray_group` starts the processes; it is imported only where a run has several devices, since Ray is an extra.
"""

from tether.execution.handles import ShardedEngine, ShardedSampler
from tether.execution.worker import Group

__all__ = ["Group", "ShardedEngine", "ShardedSampler", "ray_group"]
