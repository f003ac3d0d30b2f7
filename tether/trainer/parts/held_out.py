"""Scores of tests beside those of training: whether the first fall while the second rise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from tether.types import StateDict

TESTS = 3
"""Tests in a row whose mean is compared with that of the best three before them."""
LOST = 0.5
"""Share of what tests had gained that a clear fall takes back."""
LOST_LEVEL = 0.1
"""The same of their level, where nothing was gained."""
SCATTERS = 2.0
"""Standard deviations of a single test that a clear fall exceeds."""


@dataclass(frozen=True)
class Fall:
    """The last three tests beside the best three before them: means of tests and of training, then and now."""

    step: int
    """The last of those best tests."""
    tested: tuple[float, float]
    trained: tuple[float, float]
    is_clear: bool

    def __str__(self) -> str:
        (tested, now), (trained, rises) = self.tested, self.trained
        return (
            f"the score of training rises ({trained:.3g} to {rises:.3g}) while that of tests falls ({tested:.3g} "
            f"around step {self.step}, now {now:.3g})"
        )


@dataclass
class HeldOut:
    """All tests of a run so far, each with the mean score of the training steps since the one before it."""

    tests: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, score of the test, score of training."""
    scores: list[float] = field(default_factory=list)
    """Of the training steps since the last test."""

    def trained(self, score: float) -> None:
        """Note the score of a training step."""
        self.scores.append(score)

    def take(self, step: int, tested: float) -> Fall | None:
        """Note a test; returns what it is compared with, or None where there are too few tests.

        The scatter of a single test is estimated by the differences between tests that follow each other: half of
        their mean square is its variance (von Neumann 1941), which a slow trend hardly changes.
        """
        if not self.scores or not math.isfinite(tested):
            return None
        self.tests.append((step, tested, fmean(self.scores)))
        self.scores = []
        if len(self.tests) < 2 * TESTS:
            return None
        steps, scores, training = zip(*self.tests, strict=True)
        tested_means, trained_means = _means(scores), _means(training)
        earlier = tested_means[:-TESTS]
        best = earlier.index(max(earlier))
        fall, gained = earlier[best] - tested_means[-1], earlier[best] - earlier[0]
        scatter = math.sqrt(fmean((right - left) ** 2 for left, right in pairwise(scores)) / 2)
        clear = fall > 0 and fall >= max(LOST * gained, LOST_LEVEL * abs(earlier[best]), SCATTERS * scatter)
        return Fall(
            steps[best + TESTS - 1],
            (earlier[best], tested_means[-1]),
            (trained_means[best], trained_means[-1]),
            clear and trained_means[-1] > trained_means[best],
        )

    def state_dict(self) -> StateDict:
        """All that the next test is compared with."""
        return {"tests": [list(test) for test in self.tests], "scores": list(self.scores)}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; an older checkpoint has no tests."""
        self.tests = [(step, tested, trained) for step, tested, trained in state.get("tests", [])]
        self.scores = list(state.get("scores", []))


def _means(values: tuple[float, ...]) -> list[float]:
    return [fmean(values[first : first + TESTS]) for first in range(len(values) - TESTS + 1)]
