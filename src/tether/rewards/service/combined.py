"""Several rewards at once: the score of a response is the sum of its parts, each with a weight and logged apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from tether.rewards.outcome import Abstention, RewardError, RewardOutcome, RewardRequest, Score, is_float32


class Rewards(Protocol):
    """A service that scores responses; for the methods see `RewardPool`."""

    @property
    def durations(self) -> list[float]:
        """See `RewardPool.durations`."""

    def submit(self, index: int, request: RewardRequest) -> None:
        """See `RewardPool.submit`."""

    def collect(self) -> list[RewardOutcome]:
        """See `RewardPool.collect`."""

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """See `RewardPool.score`."""

    def close(self) -> None:
        """See `RewardPool.close`."""

    def __enter__(self) -> Rewards: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


@dataclass(frozen=True)
class Part:
    """One of several rewards."""

    rewards: Rewards
    weight: float = 1.0
    """Factor of its score; 0: it is logged and not learned from."""
    optional: bool = False
    """Where it abstains, the others score the response alone; otherwise the whole reward abstains."""
    data_sources: frozenset[str] | None = None
    """Of the responses that it scores; None: all."""

    def scores(self, request: RewardRequest) -> bool:
        """Whether it is asked about this response."""
        return self.data_sources is None or request.data_source in self.data_sources


class CombinedRewards:
    """Has the methods of a `RewardPool`.

    Args:
        parts: by name, at least one. What the first one returns beside its score keeps its name (`acc`, `pred`) unless
            a part has it; what others return stands below theirs.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = dict(parts)
        self._asked: dict[int, list[str]] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        """See `RewardPool.submit`."""
        asked = [name for name, part in self._parts.items() if part.scores(request)]
        assert asked, f"no part of the reward scores data_source {request.data_source!r}"
        self._asked[index] = asked
        for name in asked:
            self._parts[name].rewards.submit(index, request)

    def collect(self) -> list[RewardOutcome]:
        """See `RewardPool.collect`."""
        asked, self._asked = self._asked, {}
        answers = {name: iter(part.rewards.collect()) for name, part in self._parts.items()}
        seconds = {name: iter(part.rewards.durations) for name, part in self._parts.items()}
        rows = [asked[index] for index in sorted(asked)]
        self.durations = [max(next(seconds[name]) for name in names) for names in rows]
        return [self._sum({name: next(answers[name]) for name in names}) for names in rows]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """See `RewardPool.score`."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """End the processes of every part."""
        for part in self._parts.values():
            part.rewards.close()

    def __enter__(self) -> CombinedRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sum(self, outcomes: Mapping[str, RewardOutcome]) -> RewardOutcome:
        """The weighted sum of a row; else the error of a part, else an abstention."""
        for name, outcome in outcomes.items():
            if isinstance(outcome, RewardError):
                return RewardError(f"of the part {name}: {outcome.message}", outcome.traceback)
        scored = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Score)}
        silent = [name for name in outcomes if name not in scored]
        counted = [name for name in scored if self._parts[name].weight != 0]
        if not counted or not all(self._parts[name].optional for name in silent):
            return Abstention()
        total = sum(self._parts[name].weight * scored[name].value for name in counted)
        if not is_float32(total):
            return RewardError(f"the weighted sum of the parts is {total}, which does not fit into float32")
        first = next(iter(self._parts))
        extra = {
            key if name == first and key not in self._parts else f"{name}/{key}": value
            for name, outcome in scored.items()
            for key, value in outcome.extra.items()
        }
        return Score(total, extra | {name: outcome.value for name, outcome in scored.items()})
