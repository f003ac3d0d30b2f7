"""Engines that run forward and backward passes and own model and optimizer, and incidents that they record."""

from tether.training.engines.autograd import scattered
from tether.training.engines.flat import FlatEngine
from tether.training.engines.local import LocalEngine
from tether.training.engines.optimizer import OptimizerOptions

__all__ = ["FlatEngine", "LocalEngine", "OptimizerOptions", "fsdp", "scattered"]
