"""Where things run: groups of worker processes, one for each device, and handles that stand for what is in them.

`ray_group` starts the processes in a `cluster`, and raises `tether.runtime.ranks.RankLost` when one is lost; both are
imported only where they are used, since Ray is an extra. `tether.commands.train` then begins again from a checkpoint.
"""

from tether.distributed.transfers import Transfers
from tether.distributed.weights import StoredWeights
from tether.distributed.worker import AllRanks, Companion, CompanionLost, Group, NodeLost

__all__ = ["AllRanks", "Companion", "CompanionLost", "Group", "NodeLost", "StoredWeights", "Transfers"]
