"""Demonstrations: episodes for imitation learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TASK = "task"
"""Name of the text observation that describes the task."""


@dataclass(frozen=True)
class Demonstration:
    """A recorded episode of T steps."""

    observations: Mapping[str, NDArray[np.generic]]
    """Name -> [T, ...] before each action: vectors [T, n], uint8 images [T, H, W, C], the text `TASK` [T]."""
    actions: NDArray[np.generic]
    """[T, D]: integers for discrete actions, otherwise floats."""
    rewards: NDArray[np.float32]
    """[T]: rewards of the steps."""
    success: NDArray[np.bool_] | None = None
    """[T]: whether the task is solved in the step; None if the environment does not report it."""

    def __len__(self) -> int:
        return len(self.actions)
