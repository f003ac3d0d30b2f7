"""A control policy's learner, as `tether.control.build` makes it."""

from dataclasses import replace

from tether.control.learning.flat import FlatEngine
from tether.control.learning.losses import ControlLoss, RolloutForward
from tether.loop.engine import Learner, LossSpec, OptimizerOptions, UpdatePlan

OPTIONS = OptimizerOptions(lr=1e-2, weight_decay=0.0, eps=1e-5, grad_clip=0.5)


def flat_learner(policy, loss=None, plan=None, options=OPTIONS, critic_lr=1e-2, incident_dir=None):
    """By default one mini-batch of all rows."""
    loss = loss or ControlLoss()
    forward = RolloutForward(loss.logprob_level)
    return Learner(
        FlatEngine(policy, options, critic_lr, incident_dir),
        forward,
        LossSpec(forward, loss),
        plan or UpdatePlan(mini_batch_rows=32),
        critic_loss=LossSpec(forward, replace(loss, critic_only=True)),
    )
