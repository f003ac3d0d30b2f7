"""Contradictions of runs that replay the experts of a mixture; whether a model has any is looked at before it loads."""

from __future__ import annotations

from tether.config.problems import Problem
from tether.config.router_replay import replay_of
from tether.config.rules.shapes import Rule
from tether.config.schema.root import RunConfig

ACTOR = "actor_rollout_ref.actor"
RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
BYPASS = "algorithm.rollout_correction.bypass_mode"
FUSED = "moe_router_fusion"


def one_mode_is_given(cfg: RunConfig) -> Problem | None:
    """Megatron's own key inherits from the older one, and must not contradict it."""
    key, mode = replay_of(cfg)
    older = cfg.actor_rollout_ref.actor.router_replay.mode
    if older in ("disabled", mode):
        return None
    return Problem(key, f"{mode} contradicts {ACTOR}.router_replay.mode={older}", f"leave {key} out")


def the_sampler_records_what_is_replayed(cfg: RunConfig) -> Problem | None:
    """R3 replays what the sampler records, and nothing else reads it."""
    key, mode = replay_of(cfg)
    records = cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if records == (mode == "R3"):
        return None
    if records:
        return Problem(RECORDS, f"True records experts that {key}={mode} does not replay", f"set {key}=R3")
    return Problem(RECORDS, f"False records no experts, which {key}=R3 replays", f"set {RECORDS}=True")


def old_log_probs_are_recomputed(cfg: RunConfig) -> Problem | None:
    """R2 replays the experts of the pass that recomputes old log-probs."""
    key, mode = replay_of(cfg)
    if mode != "R2" or not cfg.algorithm.rollout_correction.bypass_mode:
        return None
    what = f"R2 replays the pass over the old policy that {BYPASS}=True leaves out"
    return Problem(key, what, f"set {key}=R3, or {BYPASS}=False")


def routers_can_be_told(cfg: RunConfig) -> Problem | None:
    """Transformer Engine's fused router cannot replay a choice."""
    key, mode = replay_of(cfg)
    fused = cfg.actor_rollout_ref.actor.megatron.override_transformer_config.get(FUSED)
    if cfg.actor_rollout_ref.actor.strategy != "megatron" or mode == "disabled" or not fused:
        return None
    options = f"{ACTOR}.megatron.override_transformer_config"
    what = f"{mode} replays the choices of routers, which the fused router of {options}.{FUSED}=True does not support"
    return Problem(key, what, f"leave {FUSED} out")


ROUTER_REPLAY_RULES: tuple[Rule, ...] = (
    one_mode_is_given,
    the_sampler_records_what_is_replayed,
    old_log_probs_are_recomputed,
    routers_can_be_told,
)
