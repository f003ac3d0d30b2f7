"""The interface of services that score responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from tether.text.rewards.outcome import RewardOutcome, RewardRequest


class Rewards(Protocol):
    """A service that scores responses; use it as a context manager, or `close` it."""

    durations: list[float]
    """Seconds of each call of the last `collect`, in the order of its outcomes."""

    def submit(self, index: int, request: RewardRequest) -> None:
        """Submit a request; `collect` orders its outcome by `index`."""
        ...

    def collect(self) -> list[RewardOutcome]:
        """Wait for all requests submitted since the last call and return their outcomes, ordered by index.

        Raises:
            RewardFailure: a worker ended and could not be restarted, so some requests have no outcome.
            Interrupted: a signal requests the end of the run while a call takes long.
        """
        ...

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Score all `requests` and return their outcomes, in the same order."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """Release processes and threads, if there are any."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
