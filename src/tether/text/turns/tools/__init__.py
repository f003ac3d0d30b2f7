"""Tools and environments that reply to the policy between its turns, and the processes that run them.

This package does not import torch, so that the processes start in a fraction of a second.
"""

from tether.text.turns.tools.call_formats import FORMATS, Call, CallFormat, openai_call, shortened
from tether.text.turns.tools.pool import CallRequest, Reply, StepRequest, ToolPool
from tether.text.turns.tools.spec import (
    AGENTS_KEY,
    FUNCTIONS_KEY,
    LIBRARY,
    EnvironmentSpec,
    FunctionsSpec,
    ResponderSpecs,
    ToolSpec,
    class_problem,
    environment_named,
    read_agents,
    read_environments,
    read_tools,
)

__all__ = [
    "AGENTS_KEY",
    "FORMATS",
    "FUNCTIONS_KEY",
    "LIBRARY",
    "Call",
    "CallFormat",
    "CallRequest",
    "EnvironmentSpec",
    "FunctionsSpec",
    "Reply",
    "ResponderSpecs",
    "StepRequest",
    "ToolPool",
    "ToolSpec",
    "class_problem",
    "environment_named",
    "openai_call",
    "read_agents",
    "read_environments",
    "read_tools",
    "shortened",
]
