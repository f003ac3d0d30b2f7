"""Other programs, formats of other vendors, and robots: each a folder of its own, which only a run that uses it loads.

The rest of tether imports nothing from here; it asks `integration` for a module by name when a configuration needs it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

INTEGRATIONS = {
    "agents": "tools of MCP servers, and environments of the verifiers package",
    "hubs": "published datasets, and models of the package registry",
    "megatron": "training with Megatron-core",
    "reward_models": "training of reward models",
    "rlinf": "RLinf's configuration files",
    "robots": "vision-language-action and flow policies, their simulators and recorded demonstrations",
    "sglang": "sampling with SGLang's servers",
    "verl": "verl's shell scripts",
}
"""What each integration is for."""


def integration(name: str, module: str) -> ModuleType:
    """Import a module of an integration: ``integration("megatron", "build")``.

    Raises:
        ModuleNotFoundError: a package that the integration needs is missing.
    """
    assert name in INTEGRATIONS, name
    return importlib.import_module(f"tether.integrations.{name}.{module}")
