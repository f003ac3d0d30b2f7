"""The rows of the table: which algorithm learns which task with which settings, and what counts as learned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.algorithms.tasks import LEDGER, SPELL, Task
from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

ACTOR, ROLLOUT, ALGORITHM = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
CORRECTION = f"{ALGORITHM}.rollout_correction"

LEARNED, BROKEN = 0.65, 0.4
"""Of `SPELL`, where chance is about 0.12 and the best answer that ignores the prompt gets 0.35."""
WORTH_LEARNED, WORTH_LOST = 0.6, 0.4
"""Of `LEDGER`, where chance is 0.11 and the best answer that ignores the prompt gets 0.17."""
TOLERANCE = 0.1
"""Distance from an optimum that is known exactly. Sampling noise of the 192 answers is 0.02."""


@dataclass(frozen=True)
class Case:
    """One row."""

    name: str
    group: str
    task: Task
    settings: tuple[str, ...] = ()
    steps: int = 40
    seeds: tuple[int, ...] = (1, 2, 3)
    at_least: float | None = None
    """Every seed must end at this score or above."""
    at_most: float | None = None
    """Every seed must end at this score or below: a broken run, or a method that the task is made to defeat."""
    beta: float | None = None
    """Every seed must end near the best score for a KL penalty of this weight (`optimum.best_score`)."""
    sabotage: str | None = None
    """How the run is broken: a name in `sabotage.SABOTAGES`."""
    by_hand: bool = False
    """The plain loop of `reference`, in which nothing is tether's."""
    quick: bool = False
    """Part of ``--quick``."""
    why: str = ""
    """Why the settings are not the shared ones."""


SHARED = (
    f"{ROLLOUT}.n=16",
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.shuffle=True",
    f"{ACTOR}.optim.lr=7e-3",
    f"{ACTOR}.optim.lr_scheduler_type=cosine",
    "critic.optim.lr=7e-3",
)
"""Of all runs on `SPELL`: four optimizer steps a rollout, so that ratios leave 1 and clips have something to clip."""
GRPO = f"{ALGORITHM}.adv_estimator=grpo"

ESTIMATORS: dict[str, tuple[tuple[str, ...], str]] = {
    "gdpo": ((f"{ALGORITHM}.gdpo_reward_keys=[letters,length]",), "the two halves of the score as components"),
    "raw": ((f"{ALGORITHM}.normalize_rewards=batch",), "has no baseline, and scores are never negative"),
    "grpo_passk": (
        (f"{ROLLOUT}.n=4", f"{ACTOR}.optim.lr=3e-3"),
        "one response of a group learns: small groups, small steps, and 240 of them",
    ),
}
"""Estimator -> settings beside the shared ones, and why."""

ONE_UPDATE = (f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=6", f"{ACTOR}.optim.lr=1e-2")

LOSSES: dict[str, tuple[tuple[str, ...], str]] = {
    "gpg": (ONE_UPDATE, "no ratio: one update a rollout, so a larger one"),
    "gspo": ((), "the ratio of a whole answer is clipped with all its tokens: twice the steps"),
    "cispo": ((f"{ACTOR}.optim.lr=2e-3",), "the ratio's weight holds nothing back: small steps, and 120 of them"),
    "bypass_mode": ((f"{CORRECTION}.bypass_mode=True",), "the sampler's log-probs as the old ones; ppo_clip"),
}
"""Loss -> settings beside the shared ones, and why."""

STEPS = {"gspo": 80, "pf_ppo max_min": 80, "cispo": 120, "grpo_passk": 240}
"""Rows that take longer than the others."""

OFF_POLICY: dict[str, tuple[str, ...]] = {
    # No clip: one update a rollout.
    "bypass_mode reinforce": (f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce", *ONE_UPDATE),
    "rollout_is token, rejection": (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=seq_mean_k3",
                                    f"{CORRECTION}.rollout_rs_threshold=0.1"),
    "pf_ppo pow": (f"{ALGORITHM}.use_pf_ppo=True",),
    # The extremes alone: smaller steps, and twice as many.
    "pf_ppo max_min": (f"{ALGORITHM}.use_pf_ppo=True", f"{ALGORITHM}.pf_ppo.reweight_method=max_min",
                       f"{ACTOR}.optim.lr=3e-3"),
    "pf_ppo max_random": (f"{ALGORITHM}.use_pf_ppo=True", f"{ALGORITHM}.pf_ppo.reweight_method=max_random"),
}  # fmt: skip
"""Step between sampling and update -> settings, with grpo."""

FILTERED = (f"{ALGORITHM}.filter_groups.enable=True", f"{ALGORITHM}.filter_groups.max_num_gen_batches=3")

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum-norm",
    "masked_mean_ratio",
)

BETA = 0.1
HELD = (
    f"{ALGORITHM}.adv_estimator=rloo",
    f"{ROLLOUT}.n=32",
    f"{ACTOR}.ppo_mini_batch_size=3",
    f"{ACTOR}.shuffle=True",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
    f"{ACTOR}.optim.lr=5e-3",
    f"{ACTOR}.optim.lr_scheduler_type=cosine",
)
"""Of the KL rows: an estimator that keeps the scale of the score, and a sum over tokens, as in the exact optimum."""
IN_REWARD = (f"{ALGORITHM}.use_kl_in_reward=True", f"{ALGORITHM}.kl_ctrl.kl_coef={BETA}")
IN_LOSS = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef={BETA}")

ONE_EACH = (f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=36", f"{ACTOR}.optim.lr=5e-3")
"""Of `LEDGER`: one response to each of 36 prompts."""
CRITIC = (
    f"{ALGORITHM}.adv_estimator=gae",
    "critic.optim.lr=1e-2",
    "critic.ppo_epochs=4",
    "critic.cliprange_value=100",
)
"""Values go up to 11, so they are not held within 0.5 of the old ones."""


def _spell(name: str, group: str, settings: tuple[str, ...], why: str = "") -> Case:
    return Case(name, group, SPELL, (*SHARED, *settings), STEPS.get(name, 40), at_least=LEARNED, why=why)


def _estimator(name: str) -> Case:
    settings, why = ESTIMATORS.get(name, ((), ""))
    return _spell(name, "advantages", (f"{ALGORITHM}.adv_estimator={name}", *settings), why)


def _loss(name: str) -> Case:
    settings, why = LOSSES.get(name, ((), ""))
    return _spell(name, "policy loss", (GRPO, f"{ACTOR}.policy_loss.loss_mode={name}", *settings), why)


def _kl(name: str, settings: tuple[str, ...]) -> Case:
    return Case(name, "KL", SPELL, (*HELD, *settings), steps=80, beta=BETA)


def _ledger(name: str, settings: tuple[str, ...], *, learns: bool, why: str = "") -> Case:
    bounds = (WORTH_LEARNED, None) if learns else (None, WORTH_LOST)
    return Case(name, "critic", LEDGER, settings, 60, (1, 2, 3, 4, 5), *bounds, why=why)


def _broken(case: Case, sabotage: str) -> Case:
    name = f"{case.name}, {sabotage}"
    return replace(case, name=name, group="control", at_least=None, at_most=BROKEN, sabotage=sabotage)


def all_cases() -> list[Case]:
    """Every row, in the order of the table."""
    estimators = {name: _estimator(name) for name in ADVANTAGE_ESTIMATORS}
    losses = {name: _loss(name) for name in POLICY_LOSSES}
    reference = replace(_spell("30 lines of PyTorch", "reference", ()), by_hand=True)
    cases = [
        reference,
        *estimators.values(),
        *losses.values(),
        *(_spell(mode, "aggregation", (GRPO, f"{ACTOR}.loss_agg_mode={mode}")) for mode in AGGREGATIONS),
        *(_spell(name, "off-policy", (GRPO, *settings)) for name, settings in OFF_POLICY.items()),
        replace(_spell("filter_groups", "off-policy", (GRPO, *FILTERED)), steps=25,
                why="25 steps: later every group is solved and the run says that nothing is left to learn"),
        Case("none", "KL", SPELL, HELD, steps=160, at_least=0.88, why="where the same settings go without"),
        _kl("in the reward", IN_REWARD),
        _kl("in the loss, full", (*IN_LOSS, f"{ACTOR}.kl_loss_type=full")),
        _kl("in the loss, low_var_kl+", (*IN_LOSS, f"{ACTOR}.kl_loss_type=low_var_kl+")),
        _ledger("gae, one response", (*ONE_EACH, *CRITIC), learns=True),
        _ledger("reinforce_plus_plus, one response", (*ONE_EACH, f"{ALGORITHM}.adv_estimator=reinforce_plus_plus"),
                learns=False, why="the batch mean is no baseline for prompts of different worth"),
        _ledger("gae, critic that does not learn", (*ONE_EACH, *CRITIC, "critic.optim.lr=1e-12"),
                learns=False, why="negative control"),
        _ledger("grpo, two responses to half the prompts", (GRPO, f"{ROLLOUT}.n=2", "data.train_batch_size=18",
                f"{ACTOR}.ppo_mini_batch_size=18", f"{ACTOR}.optim.lr=5e-3"),
                learns=True, why="as many responses; a second one is a baseline too"),
        _broken(estimators["gae"], "flipped"),
        _broken(estimators["grpo"], "flipped"),
        _broken(losses["gspo"], "flipped"),
        _broken(estimators["grpo"], "shuffled"),
        _broken(estimators["gae"], "shuffled"),
    ]  # fmt: skip
    quick = {"30 lines of PyTorch", "gae", "grpo", "gspo", "cispo", "pf_ppo pow", "grpo, flipped", "grpo, shuffled"}
    return [replace(case, quick=case.name in quick) for case in cases]
