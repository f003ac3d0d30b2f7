"""Warnings about runs that do not fail but in which the policy learns nothing, or the wrong behaviour."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tether.metrics.loggers import evaluation_score
from tether.trainer.parts.evaluation_history import EvaluationHistory
from tether.types import StateDict

SAME_REPLY = 0.9
"""Share of a step's responses to different prompts that are the same reply."""
SAME_REPLY_STEPS = 5
"""Consecutive steps with that share."""
MAJORITY_MARGIN = 0.01
"""Maximum difference at which a validation score counts as that of the most frequent answer."""
MAJORITY_QUESTIONS = 20
"""Number of distinct questions below which the two may agree by chance."""
MAJORITY_EVALUATIONS = 3
"""Consecutive validations within the margin; one is enough while replies are the same."""
MIN_EXPLAINED_VARIANCE = 0.01
"""Explained variance up to which a critic counts as useless."""
CRITIC_STEPS = 20
"""Consecutive steps after the warm-up in which the critic explains nothing."""
COLLAPSED_ENTROPY = 1e-2
"""Entropy in nats, above or below 0, of a policy that no longer explores."""
COLLAPSED_GRADIENT = 1e-4
"""Gradient norm that no longer changes the policy."""
COLLAPSED_STEPS = 3
"""Consecutive steps without a gradient although entropy is gone or advantages require one."""
ZERO_ADVANTAGE_STEPS = 25
"""Consecutive steps whose advantages are all 0; a few are common at first."""
MIN_DECAY = 2**-25
"""Learning rate times weight decay below which rounding leaves every float32 weight unchanged."""
SKIPPED_STEPS = 3
"""Consecutive steps without an update, since no gradient was finite."""
UNSCORED_STEPS = 3
"""Consecutive steps in which no response has a score."""
FAILING_TOOLS = 0.9
"""Share of tool calls that fail."""
FAILING_STEPS = 5
"""Consecutive steps with that share."""
KEPT_PROGRESS = 0.9
"""Share of its best progress since the first step that a policy keeps if it has solved its task."""
LOST_PROGRESS = 0.5
"""Share of its best progress up to which a policy counts as having learned nothing, or losing it."""
DRIFTED_STEPS = 5
"""Consecutive steps with one of the following."""
TRUNCATED = 0.9
"""Share of truncated responses; at most a third of that in the first step."""
SHORT = 0.1
"""Length of a response relative to that of the first step."""
REPEATED = 0.6
"""Share of a response's 4-grams that occurred earlier in it; at most half of that in the first step."""
LARGE_UPDATE_KL = 1.0
"""KL of a single step's update in nats per token, twenty times the healthy range. Tiny models reach 0.8 and learn."""
LARGE_DISTANCE = 1.0
"""KL from the policy to the reference in nats per token."""

SCORES = ("critic/score/mean", "env/return")
"""The score of text, and that of the episodes that ended in the step."""
GRADIENTS = ("actor/policy_grad_norm", "actor/grad_norm")
"""The first one is for a policy whose gradient is clipped together with its critic's."""
IDENTICAL = "response/identical_fraction"
DISTANCES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""KL to the reference or, without one, between consecutive steps."""
CALLS, FAILED_CALLS = "reward/extra/tool_calls/mean", "reward/extra/failed_tool_calls/mean"
NO_COLLAPSE = ("critic", "alike", "tools", "partial acc", "unscored", "decay", "jump")
"""Alarms of runs that learn nothing but do not lose anything either."""
SMALLER_UPDATES = "lower actor_rollout_ref.actor.optim.lr, or raise the weight of the KL to the reference"
SMALLER_CONTROL_UPDATES = "lower actor_rollout_ref.actor.optim.lr, or set a lower actor_rollout_ref.actor.target_kl"


@dataclass(frozen=True)
class Drift:
    """A degeneration of the responses or the policy, detected from a metric now and in the first step."""

    is_detected: Callable[[float, float], bool]
    message: str
    unless_learned: bool = False
    """Whether it is harmless while the score has risen."""


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
        unless_learned=True,
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
        unless_learned=True,
    ),
}

Warn = Callable[[str], None]


@dataclass
class Alarms:
    """Checks every step and validation. An alarm warns once, and again only after it was off for as many checks."""

    weight_decay: float = 0.0
    """The weight decay of the policy's optimizer."""
    streaks: dict[str, int] = field(default_factory=dict)
    """The number of consecutive checks with an alarm (positive) or without it (negative)."""
    active: list[str] = field(default_factory=list)
    """Alarms that have warned and are not off again."""
    since: dict[str, int] = field(default_factory=dict)
    """The step at which the problem of each alarm began, since it was last off for as many checks as it requires."""
    step: int = 0
    """The last step that was checked."""
    sampled_at: int = 0
    """The step whose policy sampled its batch, which is earlier with asynchronous sampling."""
    collapsed_since: int | None = None
    """The first step of the problems of all active alarms except `NO_COLLAPSE`, since which the policy is collapsing.
    It is set when such an alarm warns, and its reader resets it to None."""
    first_score: float | None = None
    best_score: float | None = None
    first: dict[str, float] = field(default_factory=dict)
    """The first value of each other metric."""
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
            self._watch(
                "replies",
                same >= SAME_REPLY,
                SAME_REPLY_STEPS,
                f"{same:.0%} of the responses to different prompts are the same reply ({IDENTICAL}, {SAME_REPLY_STEPS} "
                "steps in a row). Unless one reply is right for all prompts, the policy ignores its prompts: "
                "lower actor_rollout_ref.actor.optim.lr, add a KL loss (actor_rollout_ref.actor.use_kl_loss=true) or "
                "an entropy bonus (actor_rollout_ref.actor.entropy_coeff), and balance the answers in the data",
                warn,
            )
        explained = metrics.get("critic/vf_explained_var")
        if explained is not None and not warming_up:
            self._watch(
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
                self._watch(
                    f"{role} skipped",
                    skipped > 0 and (norm == 0 or math.isnan(norm)),
                    SKIPPED_STEPS,
                    f"the {role} has not been updated for {SKIPPED_STEPS} steps: none of its gradients was finite "
                    f"({role}/skipped_updates is {skipped:.0f}). Rewards or losses that are too large for "
                    "float32 cause that: scale rewards to about 1 (env.train.reward_coef, reward_model.reward_scale), "
                    f"lower {'critic' if role == 'critic' else 'actor_rollout_ref.actor'}.optim.lr, or replay the "
                    f"updates saved in incidents/{role}",
                    warn,
                )
        if (abstained := metrics.get("reward/abstain_rate")) is not None:
            failed = metrics.get("reward/error_rate", 0.0)
            self._watch(
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
            self._watch(
                "tools",
                failed >= FAILING_TOOLS * calls,
                FAILING_STEPS,
                f"{failed / calls:.0%} of the tool calls fail ({FAILED_CALLS}, {FAILING_STEPS} steps in a row): the "
                "policy learns from error messages. Read the conversations (trainer.rollout_data_dir): a server "
                "that the tools need may be down, or the policy may write calls that match no tool",
                warn,
            )
        self._check_decay(metrics, warn)
        self._check_jump(metrics, warn)
        self._check_collapse(metrics, warn)
        self._check_drift(metrics, warn)

    def check_validation(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Compare an evaluation with earlier ones, and the score of each data source with that of a constant answer."""
        if drop := self.history.add_evaluation(self.step, evaluation_score(metrics)):
            self._watch(
                "held-out",
                drop.is_clear,
                1,
                f"{drop}. Use the best checkpoint (trainer.keep_best), or {_smaller_updates(metrics)}",
                warn,
                since=drop.step + 2,
            )
        missing = [
            f"{key} {share:.2f}"
            for key, share in metrics.items()
            if key.startswith("val-aux/") and key.endswith("/acc/missing_fraction")
        ]
        self._watch(
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
            self._watch(
                key,
                abs(score - majority) <= MAJORITY_MARGIN,
                1 if converged else MAJORITY_EVALUATIONS,
                f"the validation score of {prefix.split('/', 1)[1][:-1]} is {score:.3f}, and always giving the most "
                f"frequent answer would score {majority:.3f} ({key}): the policy may have learned that answer and "
                "nothing else. Read the samples, balance the answers in the data, and lower "
                "actor_rollout_ref.actor.optim.lr or add a KL loss (actor_rollout_ref.actor.use_kl_loss=true)",
                warn,
                since=self.step,
            )

    def _check_decay(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Warn once that a step without a signal changes the policy, since the metrics look as if it had learned."""
        decays = metrics.get("actor/lr", 0.0) * self.weight_decay >= MIN_DECAY
        if decays and metrics.get("actor/grad_norm") == 0 and "decay" not in self.active:
            self.active.append("decay")
            warn(
                f"step {self.step} has no gradient for the policy (actor/grad_norm is 0), but the optimizer "
                "still changes it: "
                f"actor_rollout_ref.actor.optim.weight_decay={self.weight_decay:g} shrinks its weights, "
                "and Adam continues in the direction of earlier steps. Set weight_decay=0 to avoid the former"
            )

    def _check_jump(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Warn once in a run, at the first step with a large update, when it is still cheap to restart."""
        update_kl = metrics.get("actor/ppo_kl", 0.0)
        if abs(update_kl) < LARGE_UPDATE_KL or "jump" in self.active:
            return
        self.active.append("jump")
        rate = metrics.get("actor/lr", math.nan)
        warn(
            f"the update of this step moved the policy by {update_kl:.2g} nats per token (actor/ppo_kl; healthy below "
            f"0.05): {_smaller_updates(metrics)}. The rate is {rate:.2g}; try {rate / 10:.2g}"
        )

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
        self._watch(
            "alike",
            metrics.get("critic/advantages/max") == metrics.get("critic/advantages/min") == 0 and not learned,
            ZERO_ADVANTAGE_STEPS,
            f"all advantages have been 0 for {ZERO_ADVANTAGE_STEPS} steps, and the score is {score:.3g} (first "
            f"{self.first_score:.3g}): the responses to a prompt, or episodes of a group, have equal scores, and "
            "nothing is learned. Use prompts or start states that some of them solve, more of them "
            "(actor_rollout_ref.rollout.n, env.train.group_size), or a higher temperature; check the reward "
            "(tether reward check)",
            warn,
        )
        self._watch(
            "collapse",
            dead and not learned,
            COLLAPSED_STEPS,
            f"the policy has collapsed: actor/entropy is {entropy:.2g} and {key} {gradient:.2g}, while the "
            f"score is {score:.3g} (first {self.first_score:.3g}, best {self.best_score:.3g}). It no longer "
            "learns: resume from an earlier checkpoint, or start again, with a lower "
            "actor_rollout_ref.actor.optim.lr (now "
            f"{metrics.get('actor/lr', float('nan')):.2g}) or an entropy bonus (actor_rollout_ref.actor.entropy_coeff)",
            warn,
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
                detected = drift.is_detected(now, first) and (lost or not drift.unless_learned)
                message = drift.message.format(now=now, first=first, score=score_text)
                self._watch(key, detected, DRIFTED_STEPS, f"{message}, or {advice}", warn)
        if score is not None and (key := next((key for key in DISTANCES if key in metrics), "")):
            message = (
                f"the policy is {metrics[key]:.2g} nats per token away ({key}), {score_text}: nothing is gained by it"
            )
            detected = metrics[key] >= LARGE_DISTANCE and lost
            self._watch(
                "distance", detected, DRIFTED_STEPS, f"{message}. Resume from an earlier checkpoint and {advice}", warn
            )

    def _watch(
        self, name: str, detected: bool, required: int, message: str, warn: Warn, *, since: int | None = None
    ) -> None:
        before = self.streaks.get(name, 0)
        self.streaks[name] = streak = max(before, 0) + 1 if detected else min(before, 0) - 1
        if streak == 1 and (name not in self.since or before <= -required):  # a shorter pause is not a recovery
            self.since[name] = self.sampled_at if since is None else since
        if streak >= required and name not in self.active:
            self.active.append(name)
            if name not in NO_COLLAPSE:
                self.collapsed_since = min(self.since[alarm] for alarm in self.active if alarm not in NO_COLLAPSE)
            warn(message)
        elif streak <= -required and name in self.active:
            self.active.remove(name)

    def state_dict(self) -> StateDict:
        """Return everything that the next check depends on, and a collapse that was not handled."""
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
        """Load what `state_dict` returned."""
        self.step, self.since, self.collapsed_since = state["step"], dict(state["since"]), state["collapsed_since"]
        self.streaks, self.active = dict(state["streaks"]), list(state["said"])
        self.first_score, self.best_score = state["first_score"], state["best_score"]
        self.first = dict(state.get("first", {}))
        self.history.load_state_dict(state.get("held_out", {}))


def _smaller_updates(metrics: Mapping[str, float]) -> str:
    """Return the advice for a policy that changes too fast; embodied runs have no KL to a reference."""
    return SMALLER_CONTROL_UPDATES if {"env/return", "eval/return"} & metrics.keys() else SMALLER_UPDATES
