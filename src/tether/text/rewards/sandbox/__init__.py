"""Rewards that run programs against tests: in a sandbox on this machine, or on a SandboxFusion server.

`ProgramOptions` has the settings; `tether.text.rewards.router` lists the data sources whose responses are programs.
"""

from tether.text.rewards.sandbox.limits import Limits
from tether.text.rewards.sandbox.options import ProgramOptions, Server

__all__ = ["Limits", "ProgramOptions", "Server"]
