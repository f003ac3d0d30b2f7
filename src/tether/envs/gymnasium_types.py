"""Gymnasium's generic types, for environments whose observations and actions are known at run time only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, TypeAlias

import gymnasium

Env: TypeAlias = gymnasium.Env[Any, Any]
Wrapper: TypeAlias = gymnasium.Wrapper[Any, Any, Any, Any]
Space: TypeAlias = gymnasium.Space[Any]
Raw: TypeAlias = Any
"""An observation or an action as an environment gives or takes it."""
Info: TypeAlias = dict[str, Any]
Begun: TypeAlias = tuple[Raw, Info]
"""The result of `reset`."""
Stepped: TypeAlias = tuple[Raw, SupportsFloat, bool, bool, Info]
"""The result of `step`."""
Arguments: TypeAlias = Mapping[str, Any]
"""Of a simulator's constructor."""
Simulator: TypeAlias = Any
"""An object of a simulator's library, which has no types."""
Scripted: TypeAlias = Callable[[Env, Raw], Raw]
"""(environment, observation) -> action."""
