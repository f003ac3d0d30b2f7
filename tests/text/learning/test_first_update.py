"""Promise 6 in the metrics: what is logged of the first optimizer step is not mixed with what came after it."""

import pytest

from tests.text.learning.batches import make_batch, make_critic, make_engine, make_policy
from tether.loop.engine import LossSpec, UpdatePlan
from tether.text.learning.losses import PolicyForward, PolicyLoss


def test_the_first_ratio_is_that_before_any_step() -> None:
    """The first of four mini-batches meets the policy that its old log-probs are of, the others a policy that moved."""
    policy = make_policy()
    batch, engine = make_batch(policy, make_critic()), make_engine(policy, lr=0.05)
    batch.old_log_probs = engine.infer(batch, PolicyForward()).log_probs
    metrics = engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(mini_batch_rows=2), 0).metrics
    assert metrics["actor/first_update/ratio_max"] == pytest.approx(1, abs=1e-9)
    assert metrics["actor/first_update/ratio_mean"] == pytest.approx(1, abs=1e-9)
    assert metrics["actor/ratio_max"] > 1.01
