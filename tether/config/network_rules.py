"""Rules for control policies with a CNN or an LSTM (see `tether.config.rules`)."""

from __future__ import annotations

from tether.config.embodied import ACTOR
from tether.config.problems import Problem
from tether.config.schema.root import RunConfig


def sequences_stay_whole(cfg: RunConfig) -> Problem | None:
    """A policy with a memory learns from whole sequences, one for each environment of a rollout."""
    if cfg.policy.lstm_dim is None:
        return None
    decisions = cfg.env.train.max_steps_per_rollout_epoch // cfg.policy.num_action_chunks
    for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"):
        size = getattr(cfg.actor_rollout_ref.actor, name)
        if size % decisions:
            what = f"{size} is no whole number of sequences of {decisions} decisions (policy.lstm_dim is set)"
            return Problem(f"{ACTOR}.{name}", what, f"set it to a multiple of {decisions}")
    return None


def micro_batches_are_parts(cfg: RunConfig) -> Problem | None:
    """A micro-batch is a part of a mini-batch, which perceptrons take at once."""
    actor, policy = cfg.actor_rollout_ref.actor, cfg.policy
    micro, mini, key = actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size, "ppo_micro_batch_size_per_gpu"
    if micro > mini:
        return Problem(
            f"{ACTOR}.{key}", f"{micro} is more than a mini-batch ({ACTOR}.ppo_mini_batch_size)", "leave it out"
        )
    if micro < mini and policy.model_type == "mlp_policy" and policy.lstm_dim is None:
        what = f"{micro} splits mini-batches, which policy.model_type=mlp_policy without policy.lstm_dim takes at once"
        return Problem(f"{ACTOR}.{key}", what, "leave it out")
    return None


NETWORK_RULES = (sequences_stay_whole, micro_batches_are_parts)
