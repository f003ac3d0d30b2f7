"""The agents that answer between the policy's turns, as determined by names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tether.config import RunConfig
from tether.text.data.rows import SINGLE_TURN, TOOL_AGENT, Row, RowAgent, agent_of
from tether.text.turns.tools import LIBRARY, read_environments

if TYPE_CHECKING:
    from tether.batch import Prompt

TURNS = "actor_rollout_ref.rollout.multi_turn"
NEEDS_TURNS = f"answers in turns. Set {TURNS}.enable=True"
_NAMED = rf".+\.py:\w+|{LIBRARY}.+"


def row_agent(config: RunConfig, row: Row | Prompt) -> RowAgent:
    """Return the agent of a row."""
    return agent_of(row.agent_name or config.actor_rollout_ref.rollout.agent.default_agent_loop, row.extra_info)


def interactions_of(config: RunConfig) -> Sequence[str]:
    """Return the valid names in `extra_info.interaction_kwargs.name` of rows of `tool_agent`.

    Raises:
        ValueError: the file of `interaction_config_path` cannot be read.
    """
    path = config.actor_rollout_ref.rollout.multi_turn.interaction_config_path
    return list(read_environments(path)) if path else []


def agent_problem(config: RunConfig, row: Row, interactions: Sequence[str] | None) -> str:
    """Return the problem with the agent named by a row; empty if there is none.

    Args:
        config: configuration of the run.
        row: row of its data.
        interactions: names of `interactions_of`; None: unknown.
    """
    rollout, name = config.actor_rollout_ref.rollout, row.agent_name
    if name not in (None, SINGLE_TURN, TOOL_AGENT) and not re.fullmatch(_NAMED, name):
        own_class = "or your own class: FILE.py:CLASS"
        return f"`agent_name` is {name!r}; it may be {SINGLE_TURN}, {TOOL_AGENT}, {LIBRARY}ENVIRONMENT, {own_class}"
    if not rollout.multi_turn.enable:
        return "" if name in (None, SINGLE_TURN) else f"`agent_name` is {name!r}, which {NEEDS_TURNS}"
    if (name or rollout.agent.default_agent_loop) != TOOL_AGENT:
        return ""
    of_tools, of_interaction = (row.extra_info.get(key) or {} for key in ("tools_kwargs", "interaction_kwargs"))
    objects = {"tools_kwargs": of_tools, "interaction_kwargs": of_interaction}
    if isinstance(of_tools, Mapping):
        objects |= {f"tools_kwargs.{tool}": kwargs or {} for tool, kwargs in of_tools.items()}
    for key, settings in objects.items():
        if not isinstance(settings, Mapping):
            return f"`extra_info.{key}` is {str(settings)[:80]!r}, not an object with keys"
    wanted = of_interaction.get("name")
    if wanted is not None and interactions is not None and wanted not in interactions:
        available = (
            f"{TURNS}.interaction_config_path has {', '.join(interactions) or 'none: give interaction_config_path'}"
        )
        return f"`extra_info.interaction_kwargs.name` is {wanted!r}; {available}"
    return ""


def check_turns_act(config: RunConfig, agents: set[tuple[RowAgent, RowAgent]]) -> None:
    """Refuse configured turns, tools and interactions that no row of a run uses.

    Args:
        config: configuration of the run.
        agents: the agent of each row, paired with its agent if it were of `tool_agent`.

    Raises:
        ValueError: the message says what is configured, and how rows can use it.
    """
    turns, default = config.actor_rollout_ref.rollout.multi_turn, "actor_rollout_ref.rollout.agent.default_agent_loop"
    if not turns.enable:
        return
    of_tools = [agent.environment for agent, _ in agents if agent.has_tools]
    if not of_tools and not any(agent.environment for agent, _ in agents):
        advice = f"Set {default}, or give the rows an `agent_name`"
        if any(would.environment for _, would in agents):
            named = "the interaction that rows name in `extra_info.interaction_kwargs.name`"
            advice = f"Set {default}={TOOL_AGENT}, by which {named} acts"
        raise ValueError(f"{TURNS}.enable=True: no row has several turns. {advice}")
    if turns.tool_config_path and not of_tools:
        what, path, needed = "tool_config_path", turns.tool_config_path, f"is of {TOOL_AGENT} ({default})"
    elif turns.interaction_config_path and not any(of_tools):
        what, path = "interaction_config_path", turns.interaction_config_path
        needed = f"is of {TOOL_AGENT} ({default}) and names one in `extra_info.interaction_kwargs.name`"
    else:
        return
    raise ValueError(f"{TURNS}.{what}={path}: has no effect, as no row {needed}. Leave it out, or change the rows")
