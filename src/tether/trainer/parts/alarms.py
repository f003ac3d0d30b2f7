"""Warnings about runs in which every number is finite and nothing fails, and the policy learns nothing or the wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tether.metrics.loggers import evaluation_score
from tether.trainer.parts.held_out import HeldOut
from tether.types import StateDict

SAME_REPLY = 0.9
"""Share of a step's responses, over different prompts, that are one and the same reply."""
SAME_REPLY_STEPS = 5
"""Steps in a row at that share."""
MAJORITY_MARGIN = 0.01
"""Distance between a validation score and that of the most frequent answer within which they are the same."""
MAJORITY_QUESTIONS = 20
"""Distinct questions below which the two may agree by chance."""
MAJORITY_TESTS = 3
"""Validations in a row within the margin; one is enough while replies are the same."""
CRITIC_EXPLAINS = 0.01
"""Explained variance that counts as nothing."""
CRITIC_STEPS = 20
"""Steps in a row, after the warm-up, in which the critic explains nothing."""
COLLAPSED_ENTROPY = 1e-2
"""Entropy in nats, above or below 0, of a policy that no longer explores."""
COLLAPSED_GRADIENT = 1e-4
"""Norm of a gradient that no longer changes the policy."""
COLLAPSED_STEPS = 3
"""Steps in a row without a gradient, where entropy is gone or advantages ask for one."""
ALIKE_STEPS = 25
"""Steps in a row whose advantages are all 0; a few are usual at first."""
LEAST_DECAY = 2**-25
"""Learning rate times weight decay below which rounding leaves every float32 weight as it is."""
SKIPPED_STEPS = 3
"""Steps in a row without any update, since no gradient was finite."""
UNSCORED_STEPS = 3
"""Steps in a row in which no response has a score."""
FAILING_TOOLS = 0.9
"""Share of the calls of tools that fail."""
FAILING_STEPS = 5
"""Steps in a row at that share."""
KEPT_PROGRESS = 0.9
"""Share of the best progress since the first step that a policy which has solved its task keeps."""
LOST_PROGRESS = 0.5
"""Share of the best progress that a policy which is losing what it learned, or has learned nothing, is not above."""
DRIFTED_STEPS = 5
"""Steps in a row of one of the following."""
CUT = 0.9
"""Share of responses that the limit cuts; at most a third of that in the first step."""
SHORT = 0.1
"""Length of a response, as a share of that of the first step."""
REPEATED = 0.6
"""Share of a response's sequences of four tokens that it has had before; at most half of that in the first step."""
JUMP = 1.0
"""KL of a single step's update, in nats per token: twenty times the healthy range. Tiny models reach 0.8 and learn."""
FAR = 1.0
"""KL from the policy to where it came from, in nats per token."""

SCORES = ("critic/score/mean", "env/return")
"""Of text, and of the episodes that ended in the step."""
GRADIENTS = ("actor/policy_grad_norm", "actor/grad_norm")
"""The first one of a policy whose gradient is clipped together with its critic's."""
IDENTICAL = "response/identical_fraction"
DISTANCES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""KL to the reference, or, without one, of a step to the next."""
CALLS, FAILED_CALLS = "reward/extra/tool_calls/mean", "reward/extra/failed_tool_calls/mean"
NO_COLLAPSE = ("critic", "alike", "tools", "partial acc", "unscored", "decay", "jump")
"""Alarms of runs that learn nothing, and lose nothing."""
CALMER = "lower actor_rollout_ref.actor.optim.lr, or raise the weight of the KL to the reference"
CALMER_CONTROL = "lower actor_rollout_ref.actor.optim.lr, or set a lower actor_rollout_ref.actor.target_kl"


@dataclass(frozen=True)
class Drift:
    """A way for responses, or the policy, to lose themselves, seen by a metric now and in the first step."""

    found: Callable[[float, float], bool]
    message: str
    unless_learned: bool = False
    """Nothing is wrong with it while the score has risen."""


DRIFTS: Mapping[str, Drift] = {
    "response_length/clip_ratio": Drift(
        lambda now, first: now >= CUT and first <= CUT / 3,
        "{now:.0%} of the responses are cut by data.max_response_length (response_length/clip_ratio; {first:.0%} at "
        "first): the policy no longer ends them. See whether the reward pays for length, take some off for it "
        "(reward_model.overlong_buffer), raise the limit",
    ),
    "response_length/mean": Drift(
        lambda now, first: now <= SHORT * first,
        "responses have shrunk from {first:.0f} to {now:.1f} tokens (response_length/mean), {worth}. See whether the "
        "reward, or a penalty for length, pays for saying nothing",
        unless_learned=True,
    ),
    "response/repeated_fraction": Drift(
        lambda now, first: now >= REPEATED and first <= REPEATED / 2,
        "responses repeat themselves: {now:.0%} of their sequences of four tokens they have had before "
        "(response/repeated_fraction; {first:.0%} at first). Unless the task asks for that, the reward pays for it: "
        "read the samples and fix the reward (tether reward check)",
    ),
    "actor/entropy": Drift(
        lambda now, first: abs(now) <= COLLAPSED_ENTROPY and abs(first) > 3 * COLLAPSED_ENTROPY,
        "actor/entropy is {now:.2g} ({first:.2g} at first), {worth}: the policy no longer explores. Resume from an "
        "earlier checkpoint, add an entropy bonus (actor_rollout_ref.actor.entropy_coeff)",
        unless_learned=True,
    ),
}

Warn = Callable[[str], None]


@dataclass
class Alarms:
    """Watches every step and validation. Each alarm speaks once, and again only after it was off as long as it took."""

    weight_decay: float = 0.0
    """Of the policy's optimizer."""
    streaks: dict[str, int] = field(default_factory=dict)
    """Per alarm: checks in a row that found it (positive) or did not (negative)."""
    said: list[str] = field(default_factory=list)
    """Alarms that have spoken and are not off again."""
    since: dict[str, int] = field(default_factory=dict)
    """Per alarm: the step that began what it has found since it was last off as long as it takes to speak."""
    step: int = 0
    """The last one that was looked at."""
    drawn_at: int = 0
    """The step at which its batch was the newest policy's: an earlier one where sampling is ahead."""
    collapsed_since: int | None = None
    """Set where an alarm that is none of `NO_COLLAPSE` speaks, for its reader to set to None: the first step of what
    such alarms have found, all that are not off again, since the policy has been collapsing from there on."""
    first_score: float | None = None
    best_score: float | None = None
    first: dict[str, float] = field(default_factory=dict)
    """Other metrics as they were when they were first seen."""
    held_out: HeldOut = field(default_factory=HeldOut)

    def check_step(self, metrics: Mapping[str, float], *, warming_up: bool, warn: Warn) -> None:
        """Look at the metrics of a training step.

        Args:
            metrics: of the step; an alarm whose metrics are absent is left as it is.
            warming_up: only the critic learned in this step.
            warn: shows a message to the user.
        """
        self.step = int(metrics.get("training/global_step", self.step + 1))
        self.drawn_at = self.step - int(metrics.get("training/staleness", 0))
        if (same := metrics.get(IDENTICAL)) is not None:
            self._watch(
                "replies",
                same >= SAME_REPLY,
                SAME_REPLY_STEPS,
                f"{same:.0%} of the responses to different prompts are the same reply ({IDENTICAL}, {SAME_REPLY_STEPS} "
                "steps in a row). Unless one reply is right for all prompts, the policy ignores what it is asked: "
                "lower actor_rollout_ref.actor.optim.lr, add a KL loss (actor_rollout_ref.actor.use_kl_loss=true) or "
                "an entropy bonus (actor_rollout_ref.actor.entropy_coeff), and balance the answers in the data",
                warn,
            )
        explained = metrics.get("critic/vf_explained_var")
        if explained is not None and not warming_up:
            self._watch(
                "critic",
                explained <= CRITIC_EXPLAINS,
                CRITIC_STEPS,
                f"the critic has explained nothing of the returns for {CRITIC_STEPS} steps (critic/vf_explained_var is "
                f"{explained:.2g}), so advantages are noise or plain returns. If the returns vary at all, raise "
                "critic.optim.lr, train the critic alone first (trainer.critic_warmup), or take an "
                "algorithm.adv_estimator without a critic",
                warn,
            )
        for role in ("actor", "critic"):
            if (skipped := metrics.get(f"{role}/skipped_updates")) is not None:
                norm = metrics.get(f"{role}/grad_norm", 0.0)  # of the updates that were made: none
                self._watch(
                    f"{role} skipped",
                    skipped > 0 and (norm == 0 or math.isnan(norm)),
                    SKIPPED_STEPS,
                    f"the {role} has not been updated for {SKIPPED_STEPS} steps: none of its gradients was finite "
                    f"({role}/skipped_updates is {skipped:.0f}). Rewards that are too large for float32 do that, or "
                    f"losses: bring rewards to about 1 (env.train.reward_coef, reward_model.reward_scale), lower "
                    f"{'critic' if role == 'critic' else 'actor_rollout_ref.actor'}.optim.lr, or replay what is kept "
                    f"in incidents/{role}",
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
                "reward that returns None abstains: return a score, also for a response that is wrong "
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
                "that the tools need may be gone, or the policy may write calls that fit no tool",
                warn,
            )
        self._check_decay(metrics, warn)
        self._check_jump(metrics, warn)
        self._check_collapse(metrics, warn)
        self._check_drift(metrics, warn)

    def check_validation(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Compare the score of each data source with what always giving its most frequent answer would score, and the
        score of all with those of earlier tests.
        """
        if fall := self.held_out.take(self.step, evaluation_score(metrics)):
            self._watch(
                "held-out",
                fall.is_clear,
                1,
                f"{fall}. Take the checkpoint of the best test (trainer.keep_best), or {_calmer(metrics)}",
                warn,
                since=fall.step + 2,
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
            converged = "replies" in self.said
            self._watch(
                key,
                abs(score - majority) <= MAJORITY_MARGIN,
                1 if converged else MAJORITY_TESTS,
                f"the validation score of {prefix.split('/', 1)[1][:-1]} is {score:.3f}, and always giving the most "
                f"frequent answer would score {majority:.3f} ({key}): the policy may have learned that answer and "
                "nothing else. Read the samples, balance the answers in the data, and lower "
                "actor_rollout_ref.actor.optim.lr or add a KL loss (actor_rollout_ref.actor.use_kl_loss=true)",
                warn,
                since=self.step,
            )

    def _check_decay(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Tell once that a step without a signal changes the policy, since the metrics look as if it had learned."""
        acts = metrics.get("actor/lr", 0.0) * self.weight_decay >= LEAST_DECAY
        if acts and metrics.get("actor/grad_norm") == 0 and "decay" not in self.said:
            self.said.append("decay")
            warn(
                f"no response of step {self.step} says anything about the policy (actor/grad_norm is 0), and the "
                f"optimizer changes it all the same: actor_rollout_ref.actor.optim.weight_decay={self.weight_decay:g} "
                "shrinks its weights, and Adam goes on in the direction of earlier steps. Set weight_decay=0 to leave "
                "out the former"
            )

    def _check_jump(self, metrics: Mapping[str, float], warn: Warn) -> None:
        """Warn at once, and once in a run: after the first step there is still time to begin again."""
        moved = metrics.get("actor/ppo_kl", 0.0)
        if abs(moved) < JUMP or "jump" in self.said:
            return
        self.said.append("jump")
        rate = metrics.get("actor/lr", math.nan)
        warn(
            f"the update of this step moved the policy by {moved:.2g} nats per token (actor/ppo_kl; healthy below "
            f"0.05): {_calmer(metrics)}. The rate is {rate:.2g}; try {rate / 10:.2g}"
        )

    def _check_collapse(self, metrics: Mapping[str, float], warn: Warn) -> None:
        score = next((metrics[key] for key in SCORES if key in metrics), None)
        if score is None:
            return
        self.held_out.trained(score)
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
            ALIKE_STEPS,
            f"all advantages have been 0 for {ALIKE_STEPS} steps, and the score is {score:.3g} (first "
            f"{self.first_score:.3g}): the responses to a prompt, or episodes of a group, score alike, and nothing is "
            "learned. Take prompts or a start that some of them get right, more of them "
            "(actor_rollout_ref.rollout.n, env.train.group_size), or a higher temperature; try the reward "
            "(tether reward check)",
            warn,
        )
        self._watch(
            "collapse",
            dead and not learned,
            COLLAPSED_STEPS,
            f"the policy has collapsed: actor/entropy is {entropy:.2g} and {key} {gradient:.2g}, while the "
            f"score is {score:.3g} (first {self.first_score:.3g}, best {self.best_score:.3g}). It learns no "
            "more: resume from an earlier checkpoint, or begin again, with a lower "
            "actor_rollout_ref.actor.optim.lr (now "
            f"{metrics.get('actor/lr', float('nan')):.2g}) or an entropy bonus (actor_rollout_ref.actor.entropy_coeff)",
            warn,
        )

    def _check_drift(self, metrics: Mapping[str, float], warn: Warn) -> None:
        score = next((metrics[key] for key in SCORES if key in metrics), None)
        lost, worth = False, ""
        calmer = _calmer(metrics)
        if score is not None and self.first_score is not None and self.best_score is not None:
            lost = score - self.first_score <= LOST_PROGRESS * (self.best_score - self.first_score)
            worth = f"while the score is {score:.3g} (first {self.first_score:.3g}, best {self.best_score:.3g})"
        for key, drift in DRIFTS.items():
            if (now := metrics.get(key)) is not None:
                first = self.first.setdefault(key, now)
                found = drift.found(now, first) and (lost or not drift.unless_learned)
                message = drift.message.format(now=now, first=first, worth=worth)
                self._watch(key, found, DRIFTED_STEPS, f"{message}, or {calmer}", warn)
        if score is not None and (key := next((key for key in DISTANCES if key in metrics), "")):
            message = f"the policy is {metrics[key]:.2g} nats per token away ({key}), {worth}: nothing is gained by it"
            found = metrics[key] >= FAR and lost
            self._watch(
                "distance", found, DRIFTED_STEPS, f"{message}. Resume from an earlier checkpoint and {calmer}", warn
            )

    def _watch(
        self, name: str, found: bool, needed: int, message: str, warn: Warn, *, since: int | None = None
    ) -> None:
        before = self.streaks.get(name, 0)
        self.streaks[name] = streak = max(before, 0) + 1 if found else min(before, 0) - 1
        if streak == 1 and (name not in self.since or before <= -needed):  # a shorter pause was no recovery
            self.since[name] = self.drawn_at if since is None else since
        if streak >= needed and name not in self.said:
            self.said.append(name)
            if name not in NO_COLLAPSE:
                self.collapsed_since = min(self.since[alarm] for alarm in self.said if alarm not in NO_COLLAPSE)
            warn(message)
        elif streak <= -needed and name in self.said:
            self.said.remove(name)

    def state_dict(self) -> StateDict:
        """All that the next check depends on, and a collapse that nobody has acted on."""
        return {
            "step": self.step,
            "since": dict(self.since),
            "collapsed_since": self.collapsed_since,
            "streaks": dict(self.streaks),
            "said": list(self.said),
            "first_score": self.first_score,
            "best_score": self.best_score,
            "first": dict(self.first),
            "held_out": self.held_out.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave."""
        self.step, self.since, self.collapsed_since = state["step"], dict(state["since"]), state["collapsed_since"]
        self.streaks, self.said = dict(state["streaks"]), list(state["said"])
        self.first_score, self.best_score = state["first_score"], state["best_score"]
        self.first = dict(state.get("first", {}))
        self.held_out.load_state_dict(state.get("held_out", {}))


def _calmer(metrics: Mapping[str, float]) -> str:
    """Advice for a policy that changes too fast; embodied runs read no weight of a KL to a reference."""
    return CALMER_CONTROL if {"env/return", "eval/return"} & metrics.keys() else CALMER
