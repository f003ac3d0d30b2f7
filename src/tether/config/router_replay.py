"""The mode of router replay, configured by the keys of the training engine."""

from __future__ import annotations

from typing import Literal

from tether.config.schema.root import RunConfig


def replay_of(config: RunConfig) -> tuple[str, Literal["disabled", "R2", "R3"]]:
    """Return the key that applies to the training engine, and its value."""
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    if actor.strategy == "megatron":
        return f"{key}.megatron.router_replay.mode", actor.megatron.router_replay.mode
    return f"{key}.router_replay.mode", actor.router_replay.mode
