"""Rewards that run programs against tests: confined on this machine, or on a SandboxFusion server.

`ProgramOptions` says how; `tether.rewards.router` names the data whose responses are programs.
"""

from tether.rewards.sandbox.limits import Limits
from tether.rewards.sandbox.options import ProgramOptions, Server

__all__ = ["Limits", "ProgramOptions", "Server"]
