"""From a rollout to samples, by the parts that the training step runs one after the other."""

from tether.control.learning.advantages import ControlAdvantages, LearnedDecisions
from tether.control.learning.losses import RolloutForward


def make_samples(batch, policy, gamma, lam, *, logprob_level="action_level", episode_length=None, **options):
    """The samples of a batch without advantages, and its metrics; `options` are of `ControlAdvantages`."""
    batch.update_from(RolloutForward(logprob_level)(policy, batch))
    batch.token_level_rewards = batch.token_level_scores
    metrics = ControlAdvantages(gamma, lam, **options)(batch)
    samples, _ = LearnedDecisions(policy.state_width > 0, episode_length)(batch, 1)
    return samples, metrics
