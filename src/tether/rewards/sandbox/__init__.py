"""Rewards that run programs against tests: in a sandbox on this machine, or on a SandboxFusion server.

`ProgramOptions` has the settings; `tether.rewards.router` lists the data sources whose responses are programs.
"""

from tether.rewards.sandbox.limits import Limits
from tether.rewards.sandbox.options import ProgramOptions, Server

__all__ = ["Limits", "ProgramOptions", "Server"]
