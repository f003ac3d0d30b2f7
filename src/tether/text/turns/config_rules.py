"""Rules of conversations: agents, tools, environments."""

from __future__ import annotations

import re

from tether.config.devices import device_count
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, needs
from tether.config.schema.root import RunConfig
from tether.text.sampling.config import SERVERS

ROLLOUT = "actor_rollout_ref.rollout"
AGENTS = ("single_turn_agent", "tool_agent")
OWN_CLASS = r".+\.py:\w+"


def agents_are_known(cfg: RunConfig) -> Problem | None:
    """The agent is a known one or a class of the user's, and has what it needs."""
    key, name = f"{ROLLOUT}.agent.default_agent_loop", cfg.actor_rollout_ref.rollout.agent.default_agent_loop
    if name not in AGENTS and not re.fullmatch(OWN_CLASS, name):
        choices = ", ".join(AGENTS)
        return Problem(key, f"{name} is no agent", f"set it to {choices}, or to a class of your own: FILE.py:CLASS")
    turns = cfg.actor_rollout_ref.rollout.multi_turn
    if name != AGENTS[0] and not turns.enable:
        what = f"{name} answers in turns, which {ROLLOUT}.multi_turn.enable=False switches off"
        return Problem(key, what, f"set {ROLLOUT}.multi_turn.enable=True, or leave {key} out")
    if name == AGENTS[1] and not turns.tool_config_path and not turns.interaction_config_path:
        what = f"{name} has neither tools ({ROLLOUT}.multi_turn.tool_config_path) nor an environment"
        return Problem(key, what, f"give {ROLLOUT}.multi_turn.tool_config_path")
    return None


def turns_end(cfg: RunConfig) -> Problem | None:
    """A turn ends with an end-of-sequence token."""
    rollout = cfg.actor_rollout_ref.rollout
    if not rollout.multi_turn.enable or not rollout.ignore_eos:
        return None
    what = f"True lets no turn end, and {ROLLOUT}.multi_turn.enable=True asks for several"
    return Problem(f"{ROLLOUT}.ignore_eos", what, f"leave {ROLLOUT}.ignore_eos out")


def ranks_sample_one_turn(cfg: RunConfig) -> Problem | None:
    """The driver process calls tools, so it samples with servers or, on one device, natively."""
    rollout, devices = cfg.actor_rollout_ref.rollout, device_count(cfg)
    if not rollout.multi_turn.enable or devices == 1 or rollout.name in SERVERS:
        return None
    what = f"{rollout.name} samples conversations ({ROLLOUT}.multi_turn.enable=True) on one device, not on {devices}"
    return Problem(f"{ROLLOUT}.name", what, f"set it to vllm or sglang, or {_devices_key(cfg)}=1")


def _devices_key(cfg: RunConfig) -> str:
    return "trainer.n_gpus_per_node" if cfg.trainer.n_gpus_per_node > 1 else "trainer.nnodes"


TURN_RULES: tuple[Rule, ...] = (
    agents_are_known,
    needs(f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.enable"),
    needs(f"{ROLLOUT}.multi_turn.interaction_config_path", f"{ROLLOUT}.multi_turn.enable"),
    turns_end,
    ranks_sample_one_turn,
)
