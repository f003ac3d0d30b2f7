"""Detects drops of the evaluation score, by comparison with earlier evaluations and the score of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, fmean

from tether.types import StateDict

WINDOW = 3
"""Consecutive evaluations whose mean is compared with that of the best earlier ones."""
LOST_GAIN = 0.5
"""Share of the gain that a clear drop loses."""
LOST_LEVEL = 0.1
"""Share of the level that a clear drop loses if nothing was gained."""
FALSE_ALARMS = 0.01
"""Significance level that all comparisons up to an evaluation share: of runs of 100 evaluations without a drop, 1 to
3 % alarm, and 7 % if consecutive evaluations have an autocorrelation of 0.3."""
MAX_AUTOCORRELATION = 0.3
"""Expected and maximum autocorrelation of consecutive evaluations; a trend has a higher one."""


@dataclass(frozen=True)
class EvaluationDrop:
    """The last three evaluations and the best three earlier ones: mean scores of evaluation and training."""

    step: int
    """The step of the last of the best evaluations."""
    evaluation: tuple[float, float]
    """Mean scores of the best evaluations and of the last."""
    training: tuple[float, float]
    """Mean scores of training over the same steps."""
    is_clear: bool
    """Whether evaluation drops significantly, while training rises or drops too."""

    def __str__(self) -> str:
        evaluation = f"{self.evaluation[0]:.3g} around step {self.step}, now {self.evaluation[1]:.3g}"
        training = "{:.3g} to {:.3g}".format(*self.training)
        if self.training[1] > self.training[0]:
            return (
                f"the training score rises ({training}) while the evaluation score drops ({evaluation}): the policy "
                "exploits the reward instead of solving the task, or memorises its prompts. Read the samples, and fix "
                "the reward (tether reward check)"
            )
        return (
            f"the evaluation score drops ({evaluation}), and so does the training score ({training}): the policy is "
            "losing what it had learned"
        )


@dataclass
class EvaluationHistory:
    """All evaluations of a run so far, each with the mean score of the training steps before it."""

    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, score of the evaluation, mean score of training since the previous one."""
    training_scores: list[float] = field(default_factory=list)
    """Scores of the training steps since the last evaluation."""

    def add_training_score(self, score: float) -> None:
        """Add the score of a training step."""
        self.training_scores.append(score)

    def add_evaluation(self, step: int, score: float) -> EvaluationDrop | None:
        """Add an evaluation and compare it with earlier ones; return None if there are too few."""
        if not self.training_scores or not math.isfinite(score):
            return None
        self.evaluations.append((step, score, fmean(self.training_scores)))
        self.training_scores = []
        if len(self.evaluations) < 2 * WINDOW:
            return None
        steps, scores, training = zip(*self.evaluations, strict=True)
        evaluation_means, training_means = _means(scores), _means(training)
        earlier = evaluation_means[:-WINDOW]
        best = earlier.index(max(earlier))
        rises = training_means[-1] > training_means[best]
        return EvaluationDrop(
            steps[best + WINDOW - 1],
            (evaluation_means[best], evaluation_means[-1]),
            (training_means[best], training_means[-1]),
            _drops(scores, evaluation_means, best) and (rises or _drops(training, training_means, best)),
        )

    def state_dict(self) -> StateDict:
        """Return the evaluations, and the training scores since the last one."""
        return {"tests": [list(entry) for entry in self.evaluations], "scores": list(self.training_scores)}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; older checkpoints have no evaluations."""
        self.evaluations = [(step, score, training) for step, score, training in state.get("tests", [])]
        self.training_scores = list(state.get("scores", []))


def _drops(scores: tuple[float, ...], means: list[float], best: int) -> bool:
    """Return whether the last window is far and significantly below window `best`."""
    drop, gain = means[best] - means[-1], means[best] - means[0]
    is_large = drop > 0 and drop >= max(LOST_GAIN * gain, LOST_LEVEL * abs(means[best]))
    return is_large and _is_significant(drop, scores, best)


def _is_significant(drop: float, scores: tuple[float, ...], best: int) -> bool:
    """Return whether chance is unlikely to cause a drop of the last window below window `best`, the best before it.

    The variance of an evaluation is half of the mean square of the differences d between consecutive evaluations (von
    Neumann 1941), on which a slow trend has little effect. The steepest fall since the best window is excluded, since
    it may be the drop itself. With the m other differences and n = 3 evaluations per window::

        s^2 = sum d^2 / 2m,   t = drop / (s sqrt(2 v / n)),   f = 2 m^2 / (3 m - 1)

    Errors of consecutive evaluations may be correlated. If evaluations at distance k have autocorrelation r^k, E d^2 is
    2 (1 - r) times the variance of an evaluation, E d d' of neighbours is -(1 - r)^2 times it, and a mean of three has
    a larger variance::

        r = 1 + 2 mean(d d') / mean(d^2),   v = (1 + 4 r / 3 + 2 r^2 / 3) / (1 - r)

    This r has a variance of about 2 / m (Bartlett 1946), and is shrunk towards 0 by a prior of variance
    `MAX_AUTOCORRELATION`^2.

    t approximately has Student's distribution with f degrees of freedom, so z is approximately normal (Wallace 1959)::

        z = (8 f + 1) / (8 f + 3) sqrt(f ln(1 + t^2 / f))

    Each evaluation is compared with the best of all earlier windows, which makes w (w + 1) / 2 comparisons for w
    windows. They share `FALSE_ALARMS` (Bonferroni).
    """
    differences = [later - earlier for earlier, later in pairwise(scores)]
    after = best + WINDOW - 1
    steepest = min(range(after, len(differences)), key=differences.__getitem__)
    before, since = differences[:steepest], differences[steepest + 1 :]
    m, windows = len(differences) - 1, len(scores) - 2 * WINDOW + 1
    squares = math.fsum(d * d for d in before + since)
    if squares <= 0:
        return True
    products = [first * second for segment in (before, since) for first, second in pairwise(segment)]
    r = (1 + 2 * fmean(products) * m / squares) * m / (m + 2 / MAX_AUTOCORRELATION**2)
    r = min(max(r, 0.0), MAX_AUTOCORRELATION)
    v = (1 + 4 * r / 3 + 2 * r * r / 3) / (1 - r)
    t, f = drop / math.sqrt(v * squares / (WINDOW * m)), 2 * m * m / (3 * m - 1)
    z = (8 * f + 1) / (8 * f + 3) * math.sqrt(f * math.log1p(t * t / f))
    return z >= -NormalDist().inv_cdf(FALSE_ALARMS / (windows * (windows + 1) / 2))


def _means(values: tuple[float, ...]) -> list[float]:
    return [fmean(values[first : first + WINDOW]) for first in range(len(values) - WINDOW + 1)]
