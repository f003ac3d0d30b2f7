"""Types of content that only its writer and its reader know; the code between them hands it on as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

StateDict: TypeAlias = dict[str, Any]
"""State of a part in a checkpoint: names to tensors, numbers and plain containers."""
Message: TypeAlias = Mapping[str, Any]
"""A message of a conversation: `role`, `content`, and what else a chat template reads."""
ExtraInfo: TypeAlias = dict[str, Any]
"""Further fields of a row of a dataset, or of the result of a reward function."""
JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON that another program wrote: its keys are checked where they are read."""
AutogradContext: TypeAlias = Any
"""The first argument of a `torch.autograd.Function`: its forward puts attributes of its own on it for its backward."""
