"""Gradient computation: engines that own models and optimizers, and the losses that they minimise.

`protocol` has the interface of an engine and `engines` the implementations; `text` and `control` have the forward
passes and losses of the two kinds of policy.
"""

from tether.training.out_of_memory import LOWER, MicroBatchTooLarge, named_out_of_memory, out_of_memory_message
from tether.training.own_functions import advantage_estimator, policy_loss
from tether.training.protocol import (
    AnyLearner,
    AnyLoss,
    Engine,
    Forward,
    Learner,
    LossSpec,
    Outputs,
    Updated,
    UpdatePlan,
)

__all__ = [
    "LOWER",
    "AnyLearner",
    "AnyLoss",
    "Engine",
    "Forward",
    "Learner",
    "LossSpec",
    "MicroBatchTooLarge",
    "Outputs",
    "UpdatePlan",
    "Updated",
    "advantage_estimator",
    "control",
    "division",
    "engines",
    "named_out_of_memory",
    "out_of_memory_message",
    "policy_loss",
    "text",
]
