"""Bytes and seconds of transfers between the loop and its ranks."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import is_tensor_collection
from torch import Tensor

TO, FROM, WEIGHTS = "rows_to_ranks", "rows_from_ranks", "weights"
TOKEN_BYTES = 8


class Transfers:
    """Sums transfers since the last `take`; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, kind: str, count: int, seconds: float = 0.0) -> None:
        """Add bytes to `TO`, `FROM` or `WEIGHTS`, and the seconds that this process spent on packing or unpacking."""
        with self._lock:
            self._bytes[kind] += count
            self._seconds[kind] += seconds

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, and reset them."""
        with self._lock:
            metrics = {f"transfer/{kind}_bytes": float(self._bytes[kind]) for kind in (TO, FROM, WEIGHTS)}
            metrics |= {f"timing_s/{kind}": self._seconds[kind] for kind in (TO, FROM)}
            self._bytes.clear()
            self._seconds.clear()
        return metrics


def size_of(value: Any) -> int:
    """Return the bytes of all tensors, arrays and tokens in a nested value."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.nbytes)
    if is_tensor_collection(value):
        return int(value.bytes())
    if dataclasses.is_dataclass(value):
        return sum(size_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if not isinstance(value, list | tuple):
        return 0
    return TOKEN_BYTES * len(value) if value and type(value[0]) is int else sum(map(size_of, value))
