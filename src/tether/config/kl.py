"""Whether a run penalises the KL from the reference, in the loss or the reward, and how the KL is computed."""

from __future__ import annotations

from tether.config.schema.root import RunConfig


def full_kl_in_loss(cfg: RunConfig) -> bool:
    """Whether the loss has a KL of full distributions."""
    actor = cfg.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type == "full"


def full_kl_in_reward(cfg: RunConfig) -> bool:
    """Whether the reward has a KL of full distributions."""
    return cfg.algorithm.use_kl_in_reward and cfg.algorithm.kl_penalty == "full"


def reference_runs_with_actor(cfg: RunConfig) -> bool:
    """Whether the actor's engine also runs the reference, to compare the distributions of each micro-batch."""
    return full_kl_in_loss(cfg) or full_kl_in_reward(cfg)


def asks_reference(cfg: RunConfig) -> bool:
    """Whether a KL is estimated from the reference's log-probs of the sampled tokens."""
    in_reward = cfg.algorithm.use_kl_in_reward and not full_kl_in_reward(cfg)
    return in_reward or (cfg.actor_rollout_ref.actor.use_kl_loss and not full_kl_in_loss(cfg))
