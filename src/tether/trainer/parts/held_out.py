"""Scores of tests beside those of training: whether the first fall, while the second rise or fall, too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, fmean

from tether.types import StateDict

TESTS = 3
"""Tests in a row whose mean is compared with that of the best three before them."""
LOST = 0.5
"""Share of what tests had gained that a clear fall takes back."""
LOST_LEVEL = 0.1
"""The same of their level, where nothing was gained."""
FALSE_ALARMS = 0.01
"""Level that is shared by all comparisons up to a test: of runs of 100 tests that never fall, 1 to 3 % alarm, and
7 % where each test keeps 0.3 of the last one's deviation."""
ALIKE = 0.3
"""Autocorrelation of tests that follow each other: what is expected, and the most allowed for (a trend has more)."""


@dataclass(frozen=True)
class Fall:
    """The last three tests beside the best three before them: means of tests and of training, then and now."""

    step: int
    """The last of those best tests."""
    tested: tuple[float, float]
    trained: tuple[float, float]
    is_clear: bool
    """Of the tests, while training rises, or of both."""

    def __str__(self) -> str:
        tested = f"{self.tested[0]:.3g} around step {self.step}, now {self.tested[1]:.3g}"
        trained = "{:.3g} to {:.3g}".format(*self.trained)
        if self.trained[1] > self.trained[0]:
            return (
                f"the score of training rises ({trained}) while that of tests falls ({tested}): the policy learns what "
                "the reward pays for and not what it is meant for, or its prompts by heart. Read the samples, and fix "
                "the reward (tether reward check)"
            )
        return (
            f"the score of tests falls ({tested}), and that of training with it ({trained}): the policy is losing what "
            "it had learned"
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
        """Note a test; returns what it is compared with, or None where there are too few tests."""
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
        rises = trained_means[-1] > trained_means[best]
        return Fall(
            steps[best + TESTS - 1],
            (tested_means[best], tested_means[-1]),
            (trained_means[best], trained_means[-1]),
            _falls(scores, tested_means, best) and (rises or _falls(training, trained_means, best)),
        )

    def state_dict(self) -> StateDict:
        """All that the next test is compared with."""
        return {"tests": [list(test) for test in self.tests], "scores": list(self.scores)}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; an older checkpoint has no tests."""
        self.tests = [(step, tested, trained) for step, tested, trained in state.get("tests", [])]
        self.scores = list(state.get("scores", []))


def _falls(scores: tuple[float, ...], means: list[float], best: int) -> bool:
    """Whether the last window is far below window `best`, and would hardly be so by chance."""
    fall, gained = means[best] - means[-1], means[best] - means[0]
    return fall > 0 and fall >= max(LOST * gained, LOST_LEVEL * abs(means[best])) and _rare(fall, scores, best)


def _rare(fall: float, scores: tuple[float, ...], best: int) -> bool:
    """Whether chance would hardly make the last of all tests fall that far below window `best`, the best before it.

    The variance of a test is half of the mean square of the differences d between tests that follow each other (von
    Neumann 1941), which a slow trend hardly changes. The steepest fall since the best window is left out: it may be
    what is looked for. Of the m that are left, with the n = 3 tests of a window::

        s^2 = sum d^2 / 2m,   t = fall / (s sqrt(2 v / n)),   f = 2 m^2 / (3 m - 1)

    Tests of policies that follow each other may err alike. With an autocorrelation r^k of tests k apart, E d^2 is
    2 (1 - r) times the variance of a test, E d d' of neighbours -(1 - r)^2 times, and a mean of three varies more::

        r = 1 + 2 mean(d d') / mean(d^2),   v = (1 + 4 r / 3 + 2 r^2 / 3) / (1 - r)

    This r has a variance of about 2 / m (Bartlett 1946), and a prior of variance `ALIKE`^2 takes it to 0 by as much.

    t has about Student's distribution with f degrees of freedom, so z is about normal (Wallace 1959)::

        z = (8 f + 1) / (8 f + 3) sqrt(f ln(1 + t^2 / f))

    One test compares with the best of w windows, and so did all before it: of w (w + 1) / 2 comparisons, each has its
    part of `FALSE_ALARMS` (Bonferroni).
    """
    differences = [right - left for left, right in pairwise(scores)]
    after = best + TESTS - 1
    steepest = min(range(after, len(differences)), key=differences.__getitem__)
    before, since = differences[:steepest], differences[steepest + 1 :]
    m, windows = len(differences) - 1, len(scores) - 2 * TESTS + 1
    squares = math.fsum(d * d for d in before + since)
    if squares <= 0:
        return True
    products = [left * right for part in (before, since) for left, right in pairwise(part)]
    r = (1 + 2 * fmean(products) * m / squares) * m / (m + 2 / ALIKE**2)
    r = min(max(r, 0.0), ALIKE)
    v = (1 + 4 * r / 3 + 2 * r * r / 3) / (1 - r)
    t, f = fall / math.sqrt(v * squares / (TESTS * m)), 2 * m * m / (3 * m - 1)
    z = (8 * f + 1) / (8 * f + 3) * math.sqrt(f * math.log1p(t * t / f))
    return z >= -NormalDist().inv_cdf(FALSE_ALARMS / (windows * (windows + 1) / 2))


def _means(values: tuple[float, ...]) -> list[float]:
    return [fmean(values[first : first + TESTS]) for first in range(len(values) - TESTS + 1)]
