"""Integrations of other programs, file formats and robots: one folder each, which is loaded only by runs that use it.

No other package of tether imports them; `integration` imports a module by name when a configuration requires it.
Third-party packages can be integrations, too: they provide such modules (``config``, ``rewards``) and register in the
entry point group ``tether.integrations``.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

INTEGRATIONS = {
    "agents": "tools of MCP servers, environments of the verifiers package, a server with OpenAI's API",
    "hubs": "published datasets, and models of the package registry",
    "megatron": "training with Megatron-core",
    "reward_models": "training of reward models",
    "rlinf": "RLinf's configuration files",
    "robots": "vision-language-action and flow policies, their simulators and recorded demonstrations",
    "sglang": "sampling with SGLang's servers",
    "verl": "verl's shell scripts",
}
"""Name -> description of each integration of tether."""
GROUP = "tether.integrations"
"""Entry point group for integrations in other packages: name = package."""


def integration(name: str, module: str) -> ModuleType:
    """Import a module of an integration: ``integration("megatron", "build")``.

    Raises:
        ModuleNotFoundError: a package that the integration needs is missing.
    """
    package = f"{GROUP}.{name}" if name in INTEGRATIONS else installed().get(name)
    assert package is not None, name
    return importlib.import_module(f"{package}.{module}")


@cache
def installed() -> dict[str, str]:
    """Return the integrations of other installed packages: name -> package."""
    # Not imported at the top, because reading the metadata of all packages takes longer than `tether --help`.
    metadata = importlib.import_module("importlib.metadata")
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}
