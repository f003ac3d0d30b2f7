"""`rollout.multi_turn` and `rollout.agent`: conversations of several turns."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.section import ActsIf, Count, Name, NullIsUnset, Positive, PositiveFloat, Section

AGENT = "actor_rollout_ref.rollout.agent.default_agent_loop"
ENDPOINT = "endpoint"
"""Agent for rows that a program plays through an OpenAI-compatible server."""
ENDPOINT_PROGRAM = "actor_rollout_ref.rollout.agent.endpoint.program"
ENDPOINT_REWARD = "actor_rollout_ref.rollout.agent.endpoint.reward"
VERIFIERS = "verifiers"
"""Value of the endpoint's `program` for environments of verifiers, from version 0.4 on."""
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
NATIVE = ActsIf("actor_rollout_ref.rollout.name", on=("native",))


class MultiTurnConfig(Section):
    """`rollout.multi_turn`: conversations of several turns, with tools or an environment."""

    enable: bool = False
    """Allow several turns in rows, depending on their `agent_name` or agent.default_agent_loop."""
    format: Annotated[
        Literal["hermes", "llama3_json", "pythonic", "qwen3_coder", "glm", "kimi", "deepseek_v3", "gemma4", "gpt-oss"],
        ActsIf(MULTI_TURN, on=(True,), other=ActsIf(AGENT, on=(ENDPOINT,))),
    ] = "hermes"
    """The format in which the model calls tools, named as in verl and vLLM; hermes is <tool_call>{...}</tool_call>."""
    tool_config_path: str | None = None
    """YAML file of the tools, in verl's layout."""
    function_tool_path: str | None = None
    """Python file whose public functions, or those in its __all__, are further tools."""
    interaction_config_path: str | None = None
    """YAML file of environments that rows name in extra_info.interaction_kwargs.name, in verl's layout."""
    max_assistant_turns: Positive | None = None
    """Maximum number of the policy's turns, after which a conversation is truncated; null: no limit."""
    max_user_turns: Positive | None = None
    """Maximum number of replies to the policy, after which a conversation is truncated; null: no limit."""
    max_parallel_calls: Positive = 1
    """Maximum number of calls per turn that are executed; the policy gets an error for the others."""
    max_tool_response_length: Positive = 256
    """Maximum number of characters of a tool's response; longer ones are truncated."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Side of a long tool response that is kept: its left end, its right end, or both ends (middle)."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """Refuse a chat template if concatenated turns differ from its output for all of them; or ignore white space."""
    timeout: PositiveFloat = 10.0
    """Timeout in seconds for a call of a tool or a step of an environment. (tether's own key.)"""
    max_kept_tokens: Annotated[
        Count, ActsIf(MULTI_TURN, on=(True,), other=ActsIf(AGENT, on=(ENDPOINT,)), also=NATIVE)
    ] = 65536
    """Maximum tokens whose KV cache is kept for waiting conversations; others are prefilled. (tether's own key.)"""


class EndpointConfig(Section):
    """`rollout.agent.endpoint`: programs that play episodes through an OpenAI-compatible server. tether's own keys."""

    program: str | None = None
    """What plays a row's episode: a command; a Python function, FILE.py:NAME; or verifiers: the row's environment."""
    reward: Literal["function", "program"] = "function"
    """What scores an episode: the run's reward function, or the program, by its result or by POST /v1/reward."""
    model: Name = "policy"
    """Name of the policy in requests."""
    timeout: PositiveFloat = 600.0
    """Timeout of an episode in seconds, after which its program is killed."""
    max_calls: Positive = 64
    """Maximum number of an episode's calls; further ones are errors."""
    max_request_bytes: Positive = 4194304
    """Maximum size of a request in bytes; a longer one is an error."""


class AgentConfig(Section):
    """`rollout.agent`: what replies to the policy between its turns."""

    default_agent_loop: str = "single_turn_agent"
    """Agent of rows without agent_name: single_turn_agent, tool_agent or FILE.py:CLASS; endpoint: a program for all."""
    agent_loop_config_path: str | None = None
    """YAML file of further agents, in verl's layout: a list of {name, _target_: FILE.py:CLASS, ARGUMENT: VALUE}."""
    num_workers: Annotated[
        Positive, NullIsUnset(), ActsIf(MULTI_TURN, on=(True,), other=ActsIf(AGENT, on=(ENDPOINT,)))
    ] = 8
    """Number of processes that run tools and environments, or programs of the endpoint."""
    endpoint: Annotated[EndpointConfig, ActsIf(AGENT, on=(ENDPOINT,))]

    @property
    def plays_endpoint(self) -> bool:
        """Return whether programs play the rows through an OpenAI-compatible server."""
        return self.default_agent_loop == ENDPOINT

    @property
    def program_scores(self) -> bool:
        """Return whether these programs score their episodes."""
        return self.plays_endpoint and self.endpoint.reward == "program"
