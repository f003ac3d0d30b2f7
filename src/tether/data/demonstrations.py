"""Episodes that a policy can learn from by imitation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TASK = "task"
"""Name of the observation that is a text: what is to be done."""


@dataclass(frozen=True)
class Demonstration:
    """An episode of T steps."""

    observations: Mapping[str, NDArray[np.generic]]
    """Name -> [T, ...], before each action: numbers [T, n], pictures [T, H, W, C] of bytes, the `TASK` [T] of text."""
    actions: NDArray[np.generic]
    """[T, D]: integers for choices, else floats."""
    rewards: NDArray[np.float32]
    """[T]"""
    success: NDArray[np.bool_] | None = None
    """[T]: the task is solved in this step; None where the environment does not tell."""

    def __len__(self) -> int:
        return len(self.actions)
