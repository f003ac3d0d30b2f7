"""Micro-batches, packing, forward passes and losses of language models."""

from tether.training.text.forward import PolicyForward, PolicyOutputs, ReferenceModel, ValueForward, ValueOutputs
from tether.training.text.losses import Aggregation, CriticLoss, PolicyLoss, TokenSelection
from tether.training.text.micro_batches import MicroBatching
from tether.training.text.packing import Experts, sequence_lengths
from tether.training.text.scoring import (
    ConversationReader,
    PairForward,
    PairOutputs,
    PreferenceLoss,
    RewardModel,
    ScoreOutputs,
    pair_batch,
    score_batch,
    without_padding,
)

__all__ = [
    "Aggregation",
    "ConversationReader",
    "CriticLoss",
    "Experts",
    "MicroBatching",
    "PairForward",
    "PairOutputs",
    "PolicyForward",
    "PolicyLoss",
    "PolicyOutputs",
    "PreferenceLoss",
    "ReferenceModel",
    "RewardModel",
    "ScoreOutputs",
    "TokenSelection",
    "ValueForward",
    "ValueOutputs",
    "pair_batch",
    "score_batch",
    "sequence_lengths",
    "without_padding",
]
