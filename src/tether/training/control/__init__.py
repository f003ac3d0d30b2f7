"""Forward passes, losses and samples of control policies, and behaviour cloning from demonstrations."""

from tether.training.control.behaviour_cloning import Cloning, CloningData, CloningOptions, split_episodes, windows
from tether.training.control.chunk_levels import per_column
from tether.training.control.forward import RolloutForward, RolloutOutputs
from tether.training.control.losses import ControlLoss
from tether.training.control.samples import EPISODES_WEIGH_EQUALLY, Samples, dealt

__all__ = [
    "EPISODES_WEIGH_EQUALLY",
    "Cloning",
    "CloningData",
    "CloningOptions",
    "ControlLoss",
    "RolloutForward",
    "RolloutOutputs",
    "Samples",
    "dealt",
    "per_column",
    "split_episodes",
    "windows",
]
