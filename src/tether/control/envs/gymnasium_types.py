"""Aliases of Gymnasium's generic types, for environments whose spaces are known only at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, TypeAlias

import gymnasium

Env: TypeAlias = gymnasium.Env[Any, Any]
Wrapper: TypeAlias = gymnasium.Wrapper[Any, Any, Any, Any]
Space: TypeAlias = gymnasium.Space[Any]
Raw: TypeAlias = Any
"""An observation or an action in the environment's own format."""
Info: TypeAlias = dict[str, Any]
Begun: TypeAlias = tuple[Raw, Info]
"""Result of `reset`."""
Stepped: TypeAlias = tuple[Raw, SupportsFloat, bool, bool, Info]
"""Result of `step`."""
Arguments: TypeAlias = Mapping[str, Any]
"""Keyword arguments of a simulator's constructor."""
Simulator: TypeAlias = Any
"""An object of a simulator library without type annotations."""
Scripted: TypeAlias = Callable[[Env, Raw], Raw]
"""A scripted policy: (environment, observation) -> action."""
