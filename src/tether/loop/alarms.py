"""Warnings about runs that do not fail, but whose policy learns nothing or the wrong behaviour.

`Alarms` checks every step and every evaluation. `EvaluationHistory` detects drops of the evaluation score by comparing
it with earlier evaluations and with the training score. `MismatchAlarm` warns about a sampler that disagrees with the
trainer, which would not cause an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, fmean

import torch

from tether.algorithms import off_policy_metrics
from tether.batch import TrainBatch, filled
from tether.metrics.data import mismatch_metrics
from tether.metrics.loggers import evaluation_score
from tether.types import StateDict

WINDOW = 3
"""Consecutive evaluations whose mean is compared with the best earlier mean."""
LOST_GAIN = 0.5
"""A clear drop loses at least this share of the gain."""
LOST_LEVEL = 0.1
"""A clear drop loses at least this share of the level if there was no gain."""
FALSE_ALARMS = 0.01
"""Significance level for all comparisons up to an evaluation together. Of runs with 100 evaluations and no drop, 1 to
3 % raise an alarm, and 7 % if consecutive evaluations have an autocorrelation of 0.3."""
MAX_AUTOCORRELATION = 0.3
"""Standard deviation of the prior for the autocorrelation of consecutive evaluations, and its maximum; the
autocorrelation of a trend is higher."""


@dataclass(frozen=True)
class EvaluationDrop:
    """The last three evaluations compared with the best three earlier ones: mean scores of evaluation and training."""

    step: int
    """The step of the last of the best evaluations."""
    evaluation: tuple[float, float]
    """Mean scores of the best evaluations and of the last."""
    training: tuple[float, float]
    """Mean scores of training over the same steps."""
    is_clear: bool
    """Whether the evaluation score drops significantly, and the training score rises or drops too."""

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
    """Return whether a drop of the last window below the best earlier window, `best`, is unlikely to be chance.

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


MISMATCH = "rollout_corr/k3_kl"
ALARM = "training/rollout_mismatch_alarm"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 5e-3}
"""Largest KL from sampler to trainer (k3 estimate, nats per token) that rounding explains, by number format."""


def mismatch_tolerance(*dtypes: torch.dtype) -> float:
    """Return the tolerance if sampler and trainer compute in these formats: that of the coarsest one."""
    return max(TOLERANCE[dtype] for dtype in dtypes)


def sampler_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of the distance between recomputed and sampler log-probs, over all scored samples."""
    old, sampler, mask = filled(batch.old_log_probs), batch.rollout_log_probs, batch.response_mask
    if not mask.any():
        return {}
    return off_policy_metrics(old, sampler, mask) | mismatch_metrics(sampler, old, mask)


@dataclass
class MismatchAlarm:
    """Compares sampler and trainer in every step, and warns once if they disagree on the same weights and tokens."""

    # Both compute the probability of a token, but with different kernels and batch shapes, so they differ by rounding.
    # A larger difference is a bug: stale weights in the sampler, randomness in the forward pass, a different
    # temperature. The update would then treat the samples as drawn from a policy that did not draw them.

    tolerance: float
    has_warned: bool = False

    def measure(self, batch: TrainBatch, warn: Callable[[str], None]) -> dict[str, float]:
        """Return metrics of a batch with `old_log_probs`, including the alarm; `warn` shows a message to the user."""
        metrics = sampler_metrics(batch)
        return metrics | self.check(metrics, warn)

    def check(self, metrics: Mapping[str, float], warn: Callable[[str], None]) -> dict[str, float]:
        """Compare a step's mismatch with the tolerance.

        Args:
            metrics: the metrics of the step; without a valid token they lack the mismatch, and nothing is compared.
            warn: shows a message to the user.

        Returns:
            The alarm as a metric, 1 or 0.
        """
        if MISMATCH not in metrics:
            return {}
        mismatch = metrics[MISMATCH]
        is_mismatched = not mismatch <= self.tolerance  # also for NaN
        if is_mismatched and not self.has_warned:
            self.has_warned = True
            warn(
                f"sampler and trainer disagree: {MISMATCH} is {mismatch:.2g} nats per token; rounding explains at most "
                f"{self.tolerance:g}. The samples are not those of the policy that is updated. Check that the sampler "
                "has the current weights, that the forward pass draws no random numbers (dropout, noise in a router), "
                "and whether float32 in actor_rollout_ref.rollout.dtype and "
                "actor_rollout_ref.actor.fsdp_config.dtype fixes it. This is shown once; watch " + ALARM
            )
        return {ALARM: float(is_mismatched)}

    def state_dict(self) -> StateDict:
        return {"has_spoken": self.has_warned}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; a state from before this alarm existed means that it has not warned."""
        self.has_warned = state.get("has_spoken", False)


SAME_REPLY = 0.9
"""Share of a step's responses to different prompts that are identical."""
SAME_REPLY_STEPS = 5
"""Consecutive steps with that share of identical responses."""
MAJORITY_MARGIN = 0.01
"""Maximum difference at which a validation score counts as equal to that of always giving the most frequent answer."""
MAJORITY_QUESTIONS = 20
"""Number of distinct questions below which the two scores may agree by chance."""
MAJORITY_EVALUATIONS = 3
"""Consecutive validations with that agreement; one is enough while responses are identical."""
MIN_EXPLAINED_VARIANCE = 0.01
"""Explained variance up to which a critic counts as useless."""
CRITIC_STEPS = 20
"""Consecutive steps after the warm-up in which the critic explains nothing."""
COLLAPSED_ENTROPY = 1e-2
"""Entropy in nats, above or below 0, of a policy that no longer explores."""
COLLAPSED_GRADIENT = 1e-4
"""Gradient norm below which an update no longer changes the policy."""
COLLAPSED_STEPS = 3
"""Consecutive steps without a gradient, although entropy is gone or advantages would produce one."""
ZERO_ADVANTAGE_STEPS = 25
"""Consecutive steps whose advantages are all 0; a few are common at first."""
MIN_DECAY = 2**-25
"""Learning rate times weight decay below which rounding leaves every float32 weight unchanged."""
SKIPPED_STEPS = 3
"""Consecutive steps without an update because no gradient was finite."""
UNSCORED_STEPS = 3
"""Consecutive steps in which no response has a score."""
FAILING_TOOLS = 0.9
"""Share of tool calls that fail."""
FAILING_STEPS = 5
"""Consecutive steps with that share."""
KEPT_PROGRESS = 0.9
"""A policy that still has this share of its best progress since the first step counts as having solved its task."""
LOST_PROGRESS = 0.5
"""Up to this share of its best progress, a policy counts as having learned nothing, or as losing it."""
DRIFTED_STEPS = 5
"""Consecutive steps with one of the following signs of degeneration."""
TRUNCATED = 0.9
"""Share of truncated responses; the share in the first step must be at most a third of this."""
SHORT = 0.1
"""Length of a response relative to that of the first step."""
REPEATED = 0.6
"""Share of 4-grams that occurred earlier in the response; the first step must have at most half of it."""
LARGE_UPDATE_KL = 1.0
"""KL of a single step's update in nats per token, twenty times the healthy range. Tiny models reach 0.8 and learn."""
LARGE_DISTANCE = 1.0
"""KL from the policy to the reference in nats per token."""

SCORES = ("critic/score/mean", "env/return")
"""The mean score of text, and the mean return of the episodes that ended in the step."""
GRADIENTS = ("actor/policy_grad_norm", "actor/grad_norm")
"""The first one exists if the policy's gradient is clipped together with its critic's."""
IDENTICAL = "response/identical_fraction"
DISTANCES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""KL to the reference or, without a reference, between consecutive steps."""
CALLS, FAILED_CALLS = "reward/extra/tool_calls/mean", "reward/extra/failed_tool_calls/mean"
SMALLER_UPDATES = "lower actor_rollout_ref.actor.optim.lr, or raise the weight of the KL to the reference"
SMALLER_CONTROL_UPDATES = "lower actor_rollout_ref.actor.optim.lr, or set a lower actor_rollout_ref.actor.target_kl"


@dataclass(frozen=True)
class Drift:
    """A degeneration of responses or policy, detected by comparing a metric with its value in the first step."""

    is_detected: Callable[[float, float], bool]
    message: str
    unless_score_rises: bool = False
    """Whether it is harmless if the score has risen."""


DRIFTS: Mapping[str, Drift] = {
    "response_length/clip_ratio": Drift(
        lambda now, first: now >= TRUNCATED and first <= TRUNCATED / 3,
        "{now:.0%} of the responses are truncated by data.max_response_length (response_length/clip_ratio; {first:.0%} "
        "at first): the policy no longer ends them. Check whether the reward favours length, penalise it "
        "(reward_model.overlong_buffer), raise the limit",
    ),
    "response_length/mean": Drift(
        lambda now, first: now <= SHORT * first,
        "responses have shrunk from {first:.0f} to {now:.1f} tokens (response_length/mean), {score}. Check whether "
        "the reward, or a penalty for length, favours empty responses",
        unless_score_rises=True,
    ),
    "response/repeated_fraction": Drift(
        lambda now, first: now >= REPEATED and first <= REPEATED / 2,
        "responses are repetitive: {now:.0%} of their 4-grams already occurred earlier in the same response "
        "(response/repeated_fraction; {first:.0%} at first). Unless the task requires that, the reward favours it: "
        "read the samples and fix the reward (tether reward check)",
    ),
    "actor/entropy": Drift(
        lambda now, first: abs(now) <= COLLAPSED_ENTROPY and abs(first) > 3 * COLLAPSED_ENTROPY,
        "actor/entropy is {now:.2g} ({first:.2g} at first), {score}: the policy no longer explores. Resume from an "
        "earlier checkpoint, add an entropy bonus (actor_rollout_ref.actor.entropy_coeff)",
        unless_score_rises=True,
    ),
}

Warn = Callable[[str], None]


@dataclass
class Alarms:
    """Checks every step and validation. An alarm warns once, and can warn again after it was off for as many checks as
    it requires."""

    weight_decay: float = 0.0
    """The weight decay of the policy's optimizer."""
    entropy_coeff: float = 0.0
    """The weight of the entropy bonus."""
    streaks: dict[str, int] = field(default_factory=dict)
    """The number of consecutive checks with an alarm (positive) or without it (negative)."""
    active: list[str] = field(default_factory=list)
    """Alarms that have warned and are not off again."""
    since: dict[str, int] = field(default_factory=dict)
    """The step at which each collapse alarm's problem began, after the alarm was last off for long enough."""
    step: int = 0
    """The last step that was checked."""
    sampled_at: int = 0
    """The step whose policy sampled the current batch, which is earlier with asynchronous sampling."""
    collapsed_since: int | None = None
    """The first step at which any active collapse alarm detected its problem, from which on the policy loses what it
    had learned. It is set when such an alarm warns, and whoever handles the collapse resets it to None."""
    first_score: float | None = None
    best_score: float | None = None
    first: dict[str, float] = field(default_factory=dict)
    """The first value of each metric that drifts are compared with."""
    history: EvaluationHistory = field(default_factory=EvaluationHistory)

    def check_step(self, metrics: Mapping[str, float], *, warming_up: bool, warn: Warn) -> None:
        """Check the metrics of a training step.

        Args:
            metrics: metrics of the step; an alarm whose metrics are missing does not change.
            warming_up: whether only the critic learned in this step.
            warn: shows a message to the user.
        """
        self.step = int(metrics.get("training/global_step", self.step + 1))
        self.sampled_at = self.step - int(metrics.get("training/staleness", 0))
        if (same := metrics.get(IDENTICAL)) is not None:
            self._check_consecutive(
                "replies",
                same >= SAME_REPLY,
                SAME_REPLY_STEPS,
                f"{same:.0%} of the responses to different prompts are the same reply ({IDENTICAL}, {SAME_REPLY_STEPS} "
                "steps in a row). Unless one reply is right for all prompts, the policy ignores its prompts: "
                "lower actor_rollout_ref.actor.optim.lr, add a KL loss (actor_rollout_ref.actor.use_kl_loss=true) or "
                "an entropy bonus (actor_rollout_ref.actor.entropy_coeff), and balance the answers in the data",
                warn,
                is_collapse=True,
            )
        explained = metrics.get("critic/vf_explained_var")
        if explained is not None and not warming_up:
            self._check_consecutive(
                "critic",
                explained <= MIN_EXPLAINED_VARIANCE,
                CRITIC_STEPS,
                f"the critic has explained nothing of the returns for {CRITIC_STEPS} steps (critic/vf_explained_var is "
                f"{explained:.2g}), so advantages are noise or plain returns. If the returns vary at all, raise "
                "critic.optim.lr, train only the critic first (trainer.critic_warmup), or use an "
                "algorithm.adv_estimator without a critic",
                warn,
            )
        for role in ("actor", "critic"):
            if (skipped := metrics.get(f"{role}/skipped_updates")) is not None:
                norm = metrics.get(f"{role}/grad_norm", 0.0)  # the norm of the updates that were not skipped
                self._check_consecutive(
                    f"{role} skipped",
                    skipped > 0 and (norm == 0 or math.isnan(norm)),
                    SKIPPED_STEPS,
                    f"the {role} has not been updated for {SKIPPED_STEPS} steps: none of its gradients was finite "
                    f"({role}/skipped_updates is {skipped:.0f}). Rewards or losses that are too large for "
                    "float32 cause that: scale rewards to about 1 (env.train.reward_coef, reward_model.reward_scale), "
                    f"lower {'critic' if role == 'critic' else 'actor_rollout_ref.actor'}.optim.lr, or replay the "
                    f"updates saved in incidents/{role}",
                    warn,
                    is_collapse=True,
                )
        if (abstained := metrics.get("reward/abstain_rate")) is not None:
            failed = metrics.get("reward/error_rate", 0.0)
            self._check_consecutive(
                "unscored",
                abstained > 0 and abstained + failed > 1 - 1e-9,
                UNSCORED_STEPS,
                f"no response has had a score for {UNSCORED_STEPS} steps: the reward abstained on {abstained:.0%} of "
                f"them and failed on {failed:.0%} (reward/abstain_rate, reward/error_rate), so nothing is learned. A "
                "reward that returns None abstains: return a score even for a wrong response "
                "(tether reward check)",
                warn,
            )
        if (calls := metrics.get(CALLS, 0.0)) > 0:
            failed = metrics.get(FAILED_CALLS, 0.0)
            self._check_consecutive(
                "tools",
                failed >= FAILING_TOOLS * calls,
                FAILING_STEPS,
                f"{failed / calls:.0%} of the tool calls fail ({FAILED_CALLS}, {FAILING_STEPS} steps in a row): the "
                "policy learns from error messages. Read the conversations (trainer.rollout_data_dir): a server "
                "that the tools need may be down, or the policy may write calls that match no tool",
                warn,
            )
        self._check_decay(metrics, warn)
        self._check_bonus(metrics, warn)
        self._check_jump(metrics, warn)
        self._check_collapse(metrics, warn)
        self._check_drift(metrics, warn)

    def check_validation(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Compare an evaluation with earlier ones, and the score of each data source with that of a constant answer."""
        if drop := self.history.add_evaluation(self.step, evaluation_score(metrics)):
            self._check_consecutive(
                "held-out",
                drop.is_clear,
                1,
                f"{drop}. Use the best checkpoint (trainer.keep_best), or {_smaller_updates(metrics)}",
                warn,
                is_collapse=True,
                since=drop.step + 2,
            )
        missing = [
            f"{key} {share:.2f}"
            for key, share in metrics.items()
            if key.startswith("val-aux/") and key.endswith("/acc/missing_fraction")
        ]
        self._check_consecutive(
            "partial acc",
            bool(missing),
            1,
            f"the reward returns no `acc` with some of its scores ({', '.join(missing)}), "
            "so the held-out score is the mean of `reward`. Return `acc` with every score, 0 where the format is wrong",
            warn,
            since=self.step,
        )
        for key, majority in metrics.items():
            if not (key.startswith("val-aux/") and key.endswith("/majority_answer")):
                continue
            prefix = key.removesuffix("majority_answer")
            score, questions = metrics.get(prefix + "distinct_mean"), metrics[prefix + "num_distinct"]
            clear = 2 * MAJORITY_MARGIN <= majority <= 1 - 2 * MAJORITY_MARGIN  # neither "none right" nor "all right"
            if score is None or not clear or questions < MAJORITY_QUESTIONS:
                continue
            converged = "replies" in self.active
            self._check_consecutive(
                key,
                abs(score - majority) <= MAJORITY_MARGIN,
                1 if converged else MAJORITY_EVALUATIONS,
                f"the validation score of {prefix.split('/', 1)[1][:-1]} is {score:.3f}, and always giving the most "
                f"frequent answer would score {majority:.3f} ({key}): the policy may have learned that answer and "
                "nothing else. Read the samples, balance the answers in the data, and lower "
                "actor_rollout_ref.actor.optim.lr or add a KL loss (actor_rollout_ref.actor.use_kl_loss=true)",
                warn,
                is_collapse=True,
                since=self.step,
            )

    def _check_decay(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Warn once if weight decay changes the policy without a signal, because the metrics look like learning."""
        decays = metrics.get("actor/lr", 0.0) * self.weight_decay >= MIN_DECAY
        self._warn_once(
            "decay",
            decays and metrics.get("actor/grad_norm") == 0,
            f"step {self.step} has no gradient for the policy (actor/grad_norm is 0), but the optimizer "
            "still changes it: "
            f"actor_rollout_ref.actor.optim.weight_decay={self.weight_decay:g} shrinks its weights, "
            "and Adam continues in the direction of earlier steps. Set weight_decay=0 to avoid the former",
            warn,
        )

    def _check_bonus(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Warn once if only the entropy bonus moves the policy: Adam normalises its small gradient, so the update is as
        large as one that follows a reward."""
        silent = metrics.get("critic/advantages/max") == metrics.get("critic/advantages/min") == 0
        self._warn_once(
            "bonus",
            silent and self.entropy_coeff > 0 and metrics.get("actor/grad_norm", 0.0) > 0,
            f"all advantages of step {self.step} are 0, so the entropy bonus alone moves the policy, at the full "
            "learning rate: it unlearns. Set actor_rollout_ref.actor.entropy_coeff=0, or let rewards differ (more "
            "responses to a prompt, partial scores)",
            warn,
        )

    def _check_jump(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Warn once per run, at the first step with a large update, when restarting is still cheap."""
        update_kl, rate = metrics.get("actor/ppo_kl", 0.0), metrics.get("actor/lr", math.nan)
        self._warn_once(
            "jump",
            not abs(update_kl) < LARGE_UPDATE_KL,  # NaN, too
            f"the update of this step moved the policy by {update_kl:.2g} nats per token (actor/ppo_kl; healthy below "
            f"0.05): {_smaller_updates(metrics)}. The rate is {rate:.2g}; try {rate / 10:.2g}",
            warn,
        )

    def _warn_once(self, name: str, holds: bool, message: str, warn: Warn) -> None:
        """Warn the first time in a run that the problem holds."""
        if holds and name not in self.active:
            self.active.append(name)
            warn(message)

    def _check_collapse(self, metrics: Mapping[str, float], warn: Warn) -> None:
        score = next((metrics[key] for key in SCORES if key in metrics), None)
        if score is None:
            return
        self.history.add_training_score(score)
        self.first_score = score if self.first_score is None else self.first_score
        self.best_score = score if self.best_score is None else max(score, self.best_score)
        entropy, key = metrics.get("actor/entropy"), next((key for key in GRADIENTS if key in metrics), None)
        if entropy is None or key is None:
            return
        gradient = metrics[key]
        progress, best = score - self.first_score, self.best_score - self.first_score
        advantages = metrics.get("critic/advantages/max", 0.0) - metrics.get("critic/advantages/min", 0.0)
        dead = gradient <= COLLAPSED_GRADIENT and (abs(entropy) <= COLLAPSED_ENTROPY or advantages > 0)
        learned = progress > 0 and progress >= KEPT_PROGRESS * best
        self._check_consecutive(
            "alike",
            metrics.get("critic/advantages/max") == metrics.get("critic/advantages/min") == 0
            and not learned
            and "distillation/loss" not in metrics,
            ZERO_ADVANTAGE_STEPS,
            f"all advantages have been 0 for {ZERO_ADVANTAGE_STEPS} steps, and the score is {score:.3g} (first "
            f"{self.first_score:.3g}): the responses to a prompt, or episodes of a group, have equal scores, and "
            "nothing is learned. Use prompts or start states that some of them solve, more of them "
            "(actor_rollout_ref.rollout.n, env.train.group_size), or a higher temperature; check the reward "
            "(tether reward check)",
            warn,
        )
        self._check_consecutive(
            "collapse",
            dead and not learned,
            COLLAPSED_STEPS,
            f"the policy has collapsed: actor/entropy is {entropy:.2g} and {key} {gradient:.2g}, while the "
            f"score is {score:.3g} (first {self.first_score:.3g}, best {self.best_score:.3g}). It no longer "
            "learns: resume from an earlier checkpoint, or start again, with a lower "
            "actor_rollout_ref.actor.optim.lr (now "
            f"{metrics.get('actor/lr', float('nan')):.2g}) or an entropy bonus (actor_rollout_ref.actor.entropy_coeff)",
            warn,
            is_collapse=True,
        )

    def _check_drift(self, metrics: Mapping[str, float], warn: Warn) -> None:
        score = next((metrics[key] for key in SCORES if key in metrics), None)
        lost, score_text = False, ""
        advice = _smaller_updates(metrics)
        if score is not None and self.first_score is not None and self.best_score is not None:
            lost = score - self.first_score <= LOST_PROGRESS * (self.best_score - self.first_score)
            score_text = f"while the score is {score:.3g} (first {self.first_score:.3g}, best {self.best_score:.3g})"
        for key, drift in DRIFTS.items():
            if (now := metrics.get(key)) is not None:
                first = self.first.setdefault(key, now)
                detected = drift.is_detected(now, first) and (lost or not drift.unless_score_rises)
                message = drift.message.format(now=now, first=first, score=score_text)
                self._check_consecutive(key, detected, DRIFTED_STEPS, f"{message}, or {advice}", warn, is_collapse=True)
        if score is not None and (key := next((key for key in DISTANCES if key in metrics), "")):
            message = (
                f"the policy is {metrics[key]:.2g} nats per token away ({key}), {score_text}: nothing is gained by it"
            )
            detected = metrics[key] >= LARGE_DISTANCE and lost
            message = f"{message}. Resume from an earlier checkpoint and {advice}"
            self._check_consecutive("distance", detected, DRIFTED_STEPS, message, warn, is_collapse=True)

    def _check_consecutive(
        self,
        name: str,
        detected: bool,
        required: int,
        message: str,
        warn: Warn,
        *,
        is_collapse: bool = False,
        since: int | None = None,
    ) -> None:
        """Warn if a problem is detected in enough consecutive checks.

        Args:
            name: name of the alarm.
            detected: whether this check detects the problem.
            required: the number of consecutive checks.
            message: the text of the warning.
            warn: shows a message to the user.
            is_collapse: whether the policy is losing what it had learned, rather than learning nothing.
            since: the step at which a collapse began; None means the step whose policy sampled this check's batch.
        """
        before = self.streaks.get(name, 0)
        self.streaks[name] = streak = max(before, 0) + 1 if detected else min(before, 0) - 1
        # A pause of fewer checks than required is not a recovery.
        if is_collapse and streak == 1 and (name not in self.since or before <= -required):
            self.since[name] = self.sampled_at if since is None else since
        if streak >= required and name not in self.active:
            self.active.append(name)
            if is_collapse:
                self.collapsed_since = min(self.since[alarm] for alarm in self.active if alarm in self.since)
            warn(message)
        elif streak <= -required and name in self.active:
            self.active.remove(name)

    def state_dict(self) -> StateDict:
        """Return everything that the next check depends on, and a collapse that has not been handled yet."""
        return {
            "step": self.step,
            "since": dict(self.since),
            "collapsed_since": self.collapsed_since,
            "streaks": dict(self.streaks),
            "said": list(self.active),
            "first_score": self.first_score,
            "best_score": self.best_score,
            "first": dict(self.first),
            "held_out": self.history.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.step, self.since, self.collapsed_since = state["step"], dict(state["since"]), state["collapsed_since"]
        self.streaks, self.active = dict(state["streaks"]), list(state["said"])
        self.first_score, self.best_score = state["first_score"], state["best_score"]
        self.first = dict(state.get("first", {}))
        self.history.load_state_dict(state.get("held_out", {}))


def _smaller_updates(metrics: Mapping[str, float]) -> str:
    """Return the advice for a policy that changes too fast; embodied runs have no KL to a reference."""
    return SMALLER_CONTROL_UPDATES if {"env/return", "eval/return"} & metrics.keys() else SMALLER_UPDATES
