"""What the ranks of test_hosted.py have: the weights of the tiny policy."""

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tests.text.servers.bench import tiny_policy


class Policy:
    def __init__(self) -> None:
        self._reads = 0

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._reads += 1
        yield from tiny_policy().state_dict().items()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def reads(self) -> int:
        """How often the weights were gathered."""
        return self._reads


def make() -> dict[str, Any]:
    return {"policy": Policy()}
