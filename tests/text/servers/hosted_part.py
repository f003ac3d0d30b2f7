"""What the ranks of test_hosted.py have: the weights of the tiny policy."""

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

    def reads(self) -> int:
        """How often the weights were gathered."""
        return self._reads


def make() -> dict[str, Any]:
    return {"policy": Policy()}
