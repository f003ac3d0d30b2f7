"""Rules for conversations: agents, tools, environments."""

from __future__ import annotations

import re

from tether.config.devices import device_count
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, needs
from tether.config.schema.root import RunConfig
from tether.text.sampling.config import SERVERS
from tether.text.turns.config import ENDPOINT, VERIFIERS

ROLLOUT = "actor_rollout_ref.rollout"
AGENTS = ("single_turn_agent", "tool_agent", ENDPOINT)
OWN_CLASS = r".+\.py:\w+"


def agents_are_known(cfg: RunConfig) -> Problem | None:
    """The agent must be known, or a user's class, and what it needs must be configured."""
    key, name = f"{ROLLOUT}.agent.default_agent_loop", cfg.actor_rollout_ref.rollout.agent.default_agent_loop
    named_in_file = cfg.actor_rollout_ref.rollout.agent.agent_loop_config_path  # the file is read later
    if name not in AGENTS and not re.fullmatch(OWN_CLASS, name) and not named_in_file:
        choices = ", ".join(AGENTS)
        return Problem(key, f"{name} is no agent", f"set it to {choices}, or to a class of your own: FILE.py:CLASS")
    turns = cfg.actor_rollout_ref.rollout.multi_turn
    if name not in (AGENTS[0], ENDPOINT) and not turns.enable:
        what = f"{name} answers in turns, which {ROLLOUT}.multi_turn.enable=False switches off"
        return Problem(key, what, f"set {ROLLOUT}.multi_turn.enable=True, or leave {key} out")
    if name == AGENTS[1] and not any((turns.tool_config_path, turns.function_tool_path, turns.interaction_config_path)):
        what = f"{name} has neither tools nor an environment"
        return Problem(key, what, f"give {ROLLOUT}.multi_turn.tool_config_path or function_tool_path")
    return None


def endpoint_programs_are_configured(cfg: RunConfig) -> Problem | None:
    """An endpoint needs a program, which plays the conversations; nothing else may reply to its rows or score them."""
    rollout, reward = cfg.actor_rollout_ref.rollout, cfg.reward_model
    endpoint, agent = f"{ROLLOUT}.agent.endpoint", f"{ROLLOUT}.agent.default_agent_loop={ENDPOINT}"
    if not rollout.agent.plays_endpoint:
        return None
    if not rollout.agent.endpoint.program:
        fix = "give a command, such as 'python agent.py', or a function: FILE.py:NAME"
        return Problem(f"{endpoint}.program", f"missing, and {agent} needs it", fix)
    if rollout.multi_turn.enable:
        what = f"True contradicts {agent}, whose programs hold their conversations themselves"
        return Problem(f"{ROLLOUT}.multi_turn.enable", what, "leave it out")
    if rollout.enable_rollout_routing_replay:
        what = f"True: experts are not recorded with {agent}"
        return Problem(f"{ROLLOUT}.enable_rollout_routing_replay", what, "leave it out")
    scorers = {
        "custom_reward_function.path": cfg.custom_reward_function.path,
        "reward_model.enable": reward.enable,
        "reward_model.parts": reward.parts,
    }
    if rollout.agent.endpoint.program == VERIFIERS and not (rollout.agent.program_scores or any(scorers.values())):
        what = "function asks for a reward function, and none is configured: an environment scores its tasks itself"
        return Problem(f"{endpoint}.reward", what, "set it to program")
    for key, value in scorers.items():
        if rollout.agent.program_scores and value:
            what = f"program leaves the score to the program, and {key} is set"
            return Problem(f"{endpoint}.reward", what, f"set it to function, or leave {key} out")
    return None


def turns_can_end(cfg: RunConfig) -> Problem | None:
    """The policy must be able to end a turn by an end-of-sequence token."""
    rollout = cfg.actor_rollout_ref.rollout
    if not rollout.ignore_eos or not (rollout.multi_turn.enable or rollout.agent.plays_endpoint):
        return None
    what = f"True lets no turn end, and {_multi_turn_setting(cfg)} asks for several"
    return Problem(f"{ROLLOUT}.ignore_eos", what, f"leave {ROLLOUT}.ignore_eos out")


def ranks_sample_one_turn(cfg: RunConfig) -> Problem | None:
    """Tools are called by the driver process, so it must sample with servers or, on one device, natively."""
    rollout, devices = cfg.actor_rollout_ref.rollout, device_count(cfg)
    if devices == 1 or rollout.name in SERVERS or not (rollout.multi_turn.enable or rollout.agent.plays_endpoint):
        return None
    what = f"{rollout.name} samples conversations ({_multi_turn_setting(cfg)}) on one device, not on {devices}"
    return Problem(f"{ROLLOUT}.name", what, f"set it to vllm or sglang, or {_devices_key(cfg)}=1")


def _multi_turn_setting(cfg: RunConfig) -> str:
    agent = f"{ROLLOUT}.agent.default_agent_loop={ENDPOINT}"
    return agent if cfg.actor_rollout_ref.rollout.agent.plays_endpoint else f"{ROLLOUT}.multi_turn.enable=True"


def _devices_key(cfg: RunConfig) -> str:
    return "trainer.n_gpus_per_node" if cfg.trainer.n_gpus_per_node > 1 else "trainer.nnodes"


TURN_RULES: tuple[Rule, ...] = (
    agents_are_known,
    endpoint_programs_are_configured,
    needs(f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.enable"),
    needs(f"{ROLLOUT}.agent.agent_loop_config_path", f"{ROLLOUT}.multi_turn.enable"),
    needs(f"{ROLLOUT}.multi_turn.function_tool_path", f"{ROLLOUT}.multi_turn.enable"),
    needs(f"{ROLLOUT}.multi_turn.interaction_config_path", f"{ROLLOUT}.multi_turn.enable"),
    turns_can_end,
    ranks_sample_one_turn,
)
