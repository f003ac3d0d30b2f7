"""Tools and environments that reply to the policy between its turns, and the processes that run them.

This package does not import torch, so that the processes start in a fraction of a second. `verifiers_environment`
requires the library verifiers, `mcp_servers` the package mcp.
"""

from tether.tools.calls import FORMATS, Call, shortened
from tether.tools.pool import CallRequest, Reply, StepRequest, ToolPool
from tether.tools.spec import (
    LIBRARY,
    EnvironmentSpec,
    ResponderSpecs,
    ToolSpec,
    class_problem,
    environment_named,
    read_environments,
    read_tools,
)

__all__ = [
    "FORMATS",
    "LIBRARY",
    "Call",
    "CallRequest",
    "EnvironmentSpec",
    "Reply",
    "ResponderSpecs",
    "StepRequest",
    "ToolPool",
    "ToolSpec",
    "class_problem",
    "environment_named",
    "mcp_servers",
    "read_environments",
    "read_tools",
    "shortened",
    "verifiers_environment",
]
