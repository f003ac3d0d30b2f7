"""Micro-batches, packing, forward passes and losses of language models."""

from tether.training.text.forward import PolicyForward, PolicyOutputs, ReferenceModel, ValueForward, ValueOutputs
from tether.training.text.losses import Aggregation, CriticLoss, PolicyLoss, TokenSelection
from tether.training.text.micro_batches import MicroBatching
from tether.training.text.packing import sequence_lengths

__all__ = [
    "Aggregation",
    "CriticLoss",
    "MicroBatching",
    "PolicyForward",
    "PolicyLoss",
    "PolicyOutputs",
    "ReferenceModel",
    "TokenSelection",
    "ValueForward",
    "ValueOutputs",
    "sequence_lengths",
]
