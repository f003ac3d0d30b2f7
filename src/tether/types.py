"""Types of content that only its writer and its reader interpret; other code passes it on unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

StateDict: TypeAlias = dict[str, Any]
"""State of an object in a checkpoint: names to tensors, numbers and plain containers."""
Message: TypeAlias = Mapping[str, Any]
"""A message of a conversation: `role`, `content`, and other fields that a chat template reads."""
ExtraInfo: TypeAlias = dict[str, Any]
"""Further fields of a dataset row, or of the result of a reward function."""
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object written by another program; its keys are checked where they are read."""
AutogradContext: TypeAlias = Any
"""The first argument of a `torch.autograd.Function`, on which its forward stores attributes for its backward."""
