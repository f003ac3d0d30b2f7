"""Tools and environments that a policy talks to between its turns: what they are, and the processes that they run in.

It imports no torch: the processes start in a fraction of a second. `verifiers_environment` needs the library
verifiers, `mcp_servers` the package mcp.
"""

from tether.tools.calls import FORMATS, Call, shortened
from tether.tools.pool import CallRequest, Reply, StepRequest, ToolPool
from tether.tools.spec import (
    LIBRARY,
    EnvironmentSpec,
    Talkers,
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
    "StepRequest",
    "Talkers",
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
