"""Builds the conversations of a run: tools, environments, and the agents of rows."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.text.data.config import DataConfig
from tether.text.data.location import ENVIRONMENT, environment_named_by
from tether.text.data.prompts import PromptDataset, dated_template
from tether.text.data.rows import SINGLE_TURN, TOOL_AGENT, Row, RowAgent, agent_of, own_tools
from tether.text.input_checks import agent_problem, agents_of, interactions_of, row_agent
from tether.text.rewards.config import CustomRewardFunctionConfig, RewardModelConfig
from tether.text.sampling.config import RolloutConfig
from tether.text.turns.conversations import Conversations, TurnLimits
from tether.text.turns.endpoint.chat import Chat
from tether.text.turns.endpoint.endpoint import AgentEndpoint
from tether.text.turns.template import TurnTemplate
from tether.text.turns.tools import (
    FORMATS,
    FUNCTIONS_KEY,
    Call,
    FunctionsSpec,
    ResponderSpecs,
    ToolPool,
    environment_named,
    openai_call,
    read_agents,
    read_environments,
    read_tools,
)
from tether.types import JsonObject

_STARTUP = 300.0  # seconds; an environment may load a dataset


def build_tool_pool(rollout: RolloutConfig, data: DataConfig) -> ToolPool | None:
    """Start the processes of tools and environments; return None if every row has a single turn.

    Raises:
        ValueError: the configuration of tools cannot be read, or a class cannot be loaded.
    """
    turns, agent = rollout.multi_turn, rollout.agent.default_agent_loop
    if not turns.enable:
        return None
    tools = [*read_tools(turns.tool_config_path)] if turns.tool_config_path else []
    functions = turns.function_tool_path
    of_functions = [FunctionsSpec(functions, f"{FUNCTIONS_KEY}={functions}")] if functions else []
    environments = read_environments(turns.interaction_config_path) if turns.interaction_config_path else {}
    if rollout.agent.agent_loop_config_path:
        environments = environments | read_agents(rollout.agent.agent_loop_config_path)
    if agent not in (SINGLE_TURN, TOOL_AGENT, *environments):
        place = "actor_rollout_ref.rollout.agent.default_agent_loop"
        environments = environments | {agent: environment_named(agent, turns.format, place)}
    for source in (*data.train_files, *data.val_files):
        if source.startswith(ENVIRONMENT):
            name = environment_named_by(source)
            environments = environments | {name: environment_named(name, turns.format, name)}
    return ToolPool(
        ResponderSpecs((*tools, *of_functions), environments, turns.format),
        num_workers=rollout.agent.num_workers,
        timeout=turns.timeout,
        startup_timeout=_STARTUP,
    )


def scored_by_environments(custom: CustomRewardFunctionConfig, reward: RewardModelConfig) -> bool:
    """Whether rows with an environment are scored by it alone."""
    return custom.path is None and not reward.enable


def check_agents(
    rollout: RolloutConfig, prompts: PromptDataset, tools: ToolPool | None
) -> set[tuple[RowAgent, RowAgent]]:
    """Refuse rows whose agent does not exist.

    Returns:
        Pairs, for each row, of its agent and the agent that it would have as a row of `tool_agent`.

    Raises:
        ValueError: lists up to ten such rows.
    """
    interactions, named, reported = interactions_of(rollout.multi_turn), agents_of(rollout.agent), set[str]()
    agents, checked = set[tuple[RowAgent, RowAgent]](), set[str]()

    def check(row: Row) -> None:
        if problem := agent_problem(rollout, row, interactions, named):
            if problem in reported:  # all rows of a source may have the same problem
                return
            reported.add(problem)
            raise ValueError(problem)
        agent = row_agent(rollout.agent, row)
        agents.add((agent, agent_of(TOOL_AGENT, row.extra_info)))
        environment = None if agent.has_tools else agent.environment
        if tools is not None and environment is not None and environment not in checked:
            checked.add(environment)  # so that a failing one is reported once, and not loaded again for each row
            tools.check(environment)

    prompts.check_rows(check)
    return agents


def build_endpoint(
    rollout: RolloutConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]
) -> AgentEndpoint | None:
    """Start the server and the processes of programs that play episodes; return None if the run has none.

    Args:
        rollout: section of sampling.
        data: section of the prompts.
        tokenizer: tokenizer of the policy.
        ends: stop token ids.

    Raises:
        ValueError: the program cannot be loaded, or the chat template does not support this.
    """
    if not rollout.agent.plays_endpoint:
        return None
    template = dated_template(tokenizer, data.chat_template, data.chat_template_date)
    kwargs = dict(data.apply_chat_template_kwargs)
    chat = Chat(tokenizer, ends, FORMATS[rollout.multi_turn.format], template, kwargs)
    return AgentEndpoint(rollout.agent.endpoint, num_workers=rollout.agent.num_workers, chat=chat)


def build_conversations(
    rollout: RolloutConfig,
    data: DataConfig,
    tools: ToolPool | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    datasets: Sequence[PromptDataset],
    *,
    environments_score_alone: bool,
) -> Conversations | None:
    """Return the component that replies to the policy between its turns; None if responses are single turns.

    Args:
        rollout: section of sampling.
        data: section of the prompts.
        tools: processes of tools and environments.
        tokenizer: tokenizer of the policy.
        ends: stop token ids.
        datasets: all prompts.
        environments_score_alone: whether rows with an environment are scored by it alone.

    Raises:
        ValueError: turns of the chat template cannot be concatenated.
    """
    if tools is None:
        return None
    turns, default = rollout.multi_turn, rollout.agent.default_agent_loop
    kwargs = dict(data.apply_chat_template_kwargs)
    dated = dated_template(tokenizer, data.chat_template, data.chat_template_date)
    template = TurnTemplate(tokenizer, ends, dated, kwargs)
    listing = TurnTemplate(tokenizer, ends, dated, {**kwargs, "tools": tools.schemas or None})
    agents = {row_agent(rollout.agent, prompt) for prompts in datasets for prompt in prompts}
    call_format, probe = FORMATS[turns.format], list[JsonObject]()
    if any(agent.has_tools for agent in agents):
        if call_format.is_read_back:
            probe = [openai_call(Call("look_up"), "functions.look_up:0")]
        else:
            listing.check(["tool"], turns.tokenization_sanity_check_mode)
        if turns.tokenization_sanity_check_mode != "disable":
            listing.check_calls(call_format, turns.format)
    rows = [
        prompt for prompts in datasets for prompt in prompts if row_agent(rollout.agent, prompt).environment is not None
    ]
    roles = {"tool" if own_tools(prompt.extra_info) else "user" for prompt in rows}  # roles that reply to the policy
    template.check(sorted(roles), turns.tokenization_sanity_check_mode)
    return Conversations(
        pool=tools,
        tokenizer=tokenizer,
        template=template,
        tool_template=listing,
        turn_end=listing.turn_end("tool", probe) if tools.schemas else template.turn_end("user"),
        limits=TurnLimits(
            max_assistant_turns=turns.max_assistant_turns,
            max_user_turns=turns.max_user_turns,
            max_parallel_calls=turns.max_parallel_calls,
            max_tool_response_length=turns.max_tool_response_length,
            tool_response_truncate_side=turns.tool_response_truncate_side,
        ),
        call_format=call_format,
        default_agent=default,
        environments_score_alone=environments_score_alone,
    )
