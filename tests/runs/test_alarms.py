"""Alarms about runs that go on without learning: when each speaks, that it speaks once, and in whole runs."""

import copy
import math
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.runs.loops import ACTOR, Control, Loop, Text, assert_same_run
from tests.runs.recorded_runs import RUNS, kill, metrics_of, recorded
from tests.runs.steps import built
from tests.runs.tiny_run import GRPO, LIGHT, base_overrides
from tether.commands.cli import app
from tether.loop.alarms import (
    CALLS,
    COLLAPSED_STEPS,
    CRITIC_STEPS,
    DRIFTED_STEPS,
    FAILED_CALLS,
    FAILING_STEPS,
    IDENTICAL,
    MAJORITY_EVALUATIONS,
    SAME_REPLY_STEPS,
    SKIPPED_STEPS,
    UNSCORED_STEPS,
    ZERO_ADVANTAGE_STEPS,
    Alarms,
    EvaluationHistory,
)
from tether.runtime.objects import register_objects

EXPLAINED = "critic/vf_explained_var"


def steps(alarms: Alarms, key: str, values: list[float], *, warming_up: bool = False) -> list[int]:
    """How many warnings there were after each step."""
    said: list[str] = []
    counts = []
    for value in values:
        alarms.check_step({key: value}, warming_up=warming_up, warn=said.append)
        counts.append(len(said))
    return counts


def test_the_same_reply_to_all_prompts_speaks_once_and_again_only_after_it_went_away() -> None:
    enough = SAME_REPLY_STEPS
    assert steps(Alarms(), IDENTICAL, [0.95] * enough + [1.0] * 9) == [0] * (enough - 1) + [1] * 10
    assert steps(Alarms(), IDENTICAL, ([0.95] * (enough - 1) + [0.5]) * 5)[-1] == 0  # never long enough
    assert steps(Alarms(), IDENTICAL, [0.89] * 50)[-1] == 0
    flutter = [1.0] * enough + ([0.5] + [1.0] * enough) * 3
    assert steps(Alarms(), IDENTICAL, flutter)[-1] == 1
    assert steps(Alarms(), IDENTICAL, [1.0] * enough + [0.5] * enough + [1.0] * enough)[-1] == 2


def test_weight_decay_of_a_step_without_a_gradient_is_told_once() -> None:
    """Of the product of rate and decay: below 2^-25, rounding keeps the weights."""
    silent = {"actor/grad_norm": 0.0, "actor/lr": 1e-4}
    for decay, metrics, expected in (
        (0.01, silent, 1),
        (0.0, silent, 0),
        (0.01, silent | {"actor/grad_norm": 1e-9}, 0),
        (0.01, silent | {"actor/grad_norm": math.nan}, 0),  # no optimizer step was made
        (0.01, silent | {"actor/lr": 0.0}, 0),
        (0.01, silent | {"actor/lr": 1e-6}, 0),
        (0.01, {"actor/lr": 1e-4}, 0),
    ):
        alarms, said = Alarms(weight_decay=decay), list[str]()
        for _ in range(5):
            alarms.check_step(metrics, warming_up=False, warn=said.append)
            alarms.check_step(metrics | {"actor/grad_norm": 1.0}, warming_up=False, warn=said.append)
        resumed = Alarms(weight_decay=decay)
        resumed.load_state_dict(alarms.state_dict())
        resumed.check_step(metrics, warming_up=False, warn=said.append)
        assert len(said) == expected, (decay, metrics)
        assert all("step 1 " in message and "optim.weight_decay=0.01 shrinks" in message for message in said)
        assert alarms.collapsed_since is None


def test_a_run_whose_responses_score_alike_tells_that_weight_decay_acts(inputs: Path, tmp_path: Path) -> None:
    overrides = [
        *(*base_overrides(inputs, tmp_path), *GRPO, *LIGHT, "custom_reward_function.path=object:alike"),
        *(f"{ACTOR}.use_kl_loss=False", "trainer.total_training_steps=1", "trainer.test_freq=-1"),
    ]
    for decay, expected in ((0.02, ["optim.weight_decay=0.02 shrinks"]), (0.0, [])):
        said: list[str] = []
        with (
            register_objects({"alike": lambda **_: 1.0}),
            built([*overrides, f"{ACTOR}.optim.weight_decay={decay}"]) as run,
        ):
            run.trainer.loggers.warn = said.append
            run.trainer.fit()
        assert len(said) == len(expected), said
        assert all(part in message for part, message in zip(expected, said, strict=True))


def test_an_entropy_bonus_that_acts_alone_is_told_once() -> None:
    """Its gradient is small and the update is not: the optimizer divides by it."""
    alone = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "actor/grad_norm": 1e-3}
    for coefficient, metrics, expected in (
        (0.001, alone, 1),
        (0.0, alone, 0),  # a KL loss
        (0.001, alone | {"critic/advantages/max": 0.1}, 0),
        (0.001, alone | {"actor/grad_norm": 0.0}, 0),
        (0.001, alone | {"actor/grad_norm": math.nan}, 0),
        (0.001, {"actor/grad_norm": 1.0}, 0),
    ):
        alarms, said = Alarms(entropy_coeff=coefficient), list[str]()
        for _ in range(3):
            alarms.check_step(metrics, warming_up=False, warn=said.append)
        assert len(said) == expected, metrics
        assert all("entropy_coeff=0" in message for message in said)


def test_steps_without_any_score_are_told() -> None:
    """The reward abstains on every response, or on those where it does not fail; it ends no run."""
    alarms, said = Alarms(), list[str]()
    for abstained, failed in [(0.9, 0.0), *[(1 - 0.1, 0.1)] * UNSCORED_STEPS, (1.0, 0.0), (0.0, 0.0)]:
        metrics = {"reward/abstain_rate": abstained, "reward/error_rate": failed}
        alarms.check_step(metrics, warming_up=False, warn=said.append)
    (message,) = said
    assert "abstained on 90% of them and failed on 10%" in message
    assert alarms.collapsed_since is None
    assert steps(Alarms(), "reward/abstain_rate", [1.0] * 5) == [0] * (UNSCORED_STEPS - 1) + [1] * (6 - UNSCORED_STEPS)
    assert steps(Alarms(), "reward/abstain_rate", [0.99] * 50)[-1] == 0


def test_a_collapse_is_dated_by_its_first_sign_though_it_paused() -> None:
    """A pause that is shorter than what it takes to speak is no recovery."""

    def since(*values: float) -> int | None:
        alarms = Alarms()
        steps(alarms, IDENTICAL, list(values))
        return alarms.collapsed_since

    enough, off, on = SAME_REPLY_STEPS, 0.5, 1.0
    assert since(off, off, *[on] * enough) == 3
    assert since(off, off, on, on, off, *[on] * enough) == 3
    assert since(off, off, on, *[off] * (enough - 1), *[on] * enough) == 3
    assert since(off, off, on, *[off] * enough, *[on] * enough) == 4 + enough


def test_a_step_that_moves_the_policy_far_is_said_at_once_and_once() -> None:
    """The numbers are those of a run with a learning rate of 1e-3; a rate of 1e-5 stays silent."""
    said: list[str] = []
    alarms = Alarms()
    alarms.check_step({"actor/ppo_kl": 1.46, "actor/lr": 1e-3}, warming_up=False, warn=said.append)
    assert re.search(r"by 1\.5 nats per token .*optim\.lr, .*\. The rate is 0\.001; try 0\.0001", said[0])
    assert alarms.collapsed_since is None  # ends no run
    resumed = Alarms()
    resumed.load_state_dict(alarms.state_dict())
    for one in (alarms, resumed):
        one.check_step({"actor/ppo_kl": 0.01, "actor/lr": 1e-3}, warming_up=False, warn=said.append)
        one.check_step({"actor/ppo_kl": -2.0, "actor/lr": 1e-3}, warming_up=False, warn=said.append)
    assert len(said) == 1
    assert steps(Alarms(), "actor/ppo_kl", [0.05, -0.01, 0.9]) == [0, 0, 0]
    assert steps(Alarms(), "actor/ppo_kl", [0.05, -1.1]) == [0, 1]  # the estimate may be negative


def test_tools_that_fail_are_said() -> None:
    def warnings(calls: list[tuple[float, float]]) -> list[str]:
        alarms, said = Alarms(), list[str]()
        for made, failed in calls:
            alarms.check_step({CALLS: made, FAILED_CALLS: failed}, warming_up=False, warn=said.append)
        assert alarms.collapsed_since is None
        return said

    (said,) = warnings([(2.0, 1.9)] * FAILING_STEPS)
    assert said.startswith("95% of the tool calls fail (reward/extra/failed_tool_calls/mean, 5 steps in a row)")
    assert not warnings([(2.0, 1.9)] * (FAILING_STEPS - 1))
    assert not warnings([(2.0, 1.0), (0.0, 0.0)] * 9)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("norm", [0.0, float("nan")])
def test_steps_without_any_update_are_said(role: str, norm: float) -> None:
    """Control policies log a norm of 0 where no gradient was finite, language models NaN."""

    def warnings(skipped: list[float], norm: float) -> int:
        alarms, said = Alarms(), list[str]()
        for count in skipped:
            found = {f"{role}/skipped_updates": count, f"{role}/grad_norm": norm}
            alarms.check_step(found, warming_up=False, warn=said.append)
        assert all(f"the {role} has not been updated" in message for message in said)
        return len(said)

    assert [warnings([4.0] * count, norm) for count in (SKIPPED_STEPS - 1, SKIPPED_STEPS, 20)] == [0, 1, 1]
    assert warnings([4.0, 4.0, 0.0] * 9, norm) == 0
    assert warnings([4.0] * 9, 0.5) == 0  # others were made


@pytest.mark.parametrize("explained", [0.0, -3.0, 0.01])
def test_a_critic_that_explains_nothing(explained: float) -> None:
    assert steps(Alarms(), EXPLAINED, [explained] * CRITIC_STEPS) == [0] * (CRITIC_STEPS - 1) + [1]
    assert steps(Alarms(), EXPLAINED, [explained] * 2 * CRITIC_STEPS, warming_up=True)[-1] == 0
    assert steps(Alarms(), EXPLAINED, ([explained] * (CRITIC_STEPS - 1) + [0.2]) * 3)[-1] == 0


def collapse(
    scores: list[float],
    entropy: float = 0.0,
    gradient: float = 0.0,
    key: str = "critic/score/mean",
    advantage: float = 0.0,
) -> int:
    """Warnings of a run whose policy is as given from the second step on."""
    alarms, said = Alarms(), list[str]()
    for number, score in enumerate(scores):
        shut = {"actor/entropy": entropy, "actor/grad_norm": gradient} if number else {}
        advantages = {"critic/advantages/max": advantage, "critic/advantages/min": -advantage}
        metrics = {key: score, "actor/entropy": 2.0, "actor/grad_norm": 1.0} | shut | advantages
        alarms.check_step(metrics, warming_up=False, warn=said.append)
    return len(said)


@pytest.mark.parametrize("key", ["critic/score/mean", "env/return"])
def test_entropy_and_gradient_of_zero_are_a_collapse_unless_the_score_rose(key: str) -> None:
    assert collapse([0.2] + [0.2] * COLLAPSED_STEPS, key=key) == 1
    assert collapse([0.2, 0.6, 0.1, 0.1, 0.1, 0.1], key=key) == 1  # it had learned, and lost it
    assert collapse([0.2] + [1.0] * 20, key=key) == 0  # it has solved its task
    assert collapse([0.2] + [0.2] * (COLLAPSED_STEPS - 1), key=key) == 0
    assert collapse([0.2] * 20, entropy=0.02, key=key) == 0
    assert collapse([0.2] * 20, entropy=-0.02, key=key) == 0  # of a density: below 0 is nothing special
    assert collapse([0.2] * DRIFTED_STEPS, gradient=0.01, key=key) == 0
    assert collapse([0.2] * 20, entropy=5.0, key=key) == 0  # all scores of a group are equal: nothing to learn from
    assert collapse([0.2] * 20, entropy=5.0, advantage=1.0, key=key) == 1  # a dead network


def test_scores_that_are_always_alike() -> None:
    def alike(scores: list[float], advantage: float = 0.0, **more: float) -> bool:
        alarms, said = Alarms(), list[str]()
        for score in scores:
            advantages = {"critic/advantages/max": advantage, "critic/advantages/min": -advantage}
            metrics = {"critic/score/mean": score, "actor/entropy": 2.0, "actor/grad_norm": 0.5} | advantages | more
            alarms.check_step(metrics, warming_up=False, warn=said.append)
        assert alarms.collapsed_since is None  # nothing is lost, so that no run ends of it
        return [text.startswith("all advantages have been 0") for text in said] == [True]

    assert alike([0.0] * ZERO_ADVANTAGE_STEPS)
    assert alike([1.0] * ZERO_ADVANTAGE_STEPS)
    assert not alike([0.0] * (ZERO_ADVANTAGE_STEPS - 1))
    assert not alike([0.0] * ZERO_ADVANTAGE_STEPS, advantage=0.1)
    assert not alike([0.0] + [1.0] * ZERO_ADVANTAGE_STEPS)  # it has solved its task
    assert not alike([0.0] * ZERO_ADVANTAGE_STEPS, **{"distillation/loss": 0.1})  # it learns from a teacher


def test_a_critics_gradient_hides_no_dead_policy() -> None:
    metrics = {"env/return": 1.0, "actor/entropy": 0.0, "actor/grad_norm": 3.0, "actor/policy_grad_norm": 0.0}
    alarms, said = Alarms(), list[str]()
    for _ in range(COLLAPSED_STEPS):
        alarms.check_step(metrics, warming_up=False, warn=said.append)
    assert ["and actor/policy_grad_norm 0, while the score is 1" in text for text in said] == [True]
    for _ in range(9):  # a rollout in which no episode ended says nothing, neither way
        alarms.check_step({k: v for k, v in metrics.items() if k != "env/return"}, warming_up=False, warn=said.append)
    assert alarms.streaks["collapse"] == COLLAPSED_STEPS


@pytest.mark.parametrize("key", ["critic/score/mean", "env/return"])
def test_an_entropy_that_is_gone_beside_a_gradient(key: str) -> None:
    def warnings(entropies: list[float], scores: list[float]) -> list[str]:
        alarms, said = Alarms(), list[str]()
        for entropy, score in zip(entropies, scores, strict=True):
            metrics = {"actor/entropy": entropy, "actor/grad_norm": 0.3, key: score}
            alarms.check_step(metrics, warming_up=False, warn=said.append)
        return said

    gone = [2.0] + [0.004] * DRIFTED_STEPS
    flat, learned = [0.2] * len(gone), [0.2] + [0.9] * DRIFTED_STEPS
    (said,) = warnings(gone, flat)
    assert said.startswith("actor/entropy is 0.004 (2 at first), while the score is 0.2 (first 0.2, best 0.2)")
    assert warnings(gone[:-1], flat[:-1]) == []
    assert warnings([2.0] + [0.02] * DRIFTED_STEPS, flat) == []
    assert warnings([2.0] + [-0.02] * DRIFTED_STEPS, flat) == []  # of a density: below 0 is nothing special
    assert warnings([0.02] + [0.004] * DRIFTED_STEPS, flat) == []  # it has never explored
    assert warnings(gone, learned) == []  # it knows the answers
    assert len(warnings([*gone, *gone[1:]], [*learned, *[0.4] * DRIFTED_STEPS])) == 1  # and has lost them


CUT, LENGTH, REPEATED = "response_length/clip_ratio", "response_length/mean", "response/repeated_fraction"


@pytest.mark.parametrize(
    ("key", "first", "then", "well"),
    [(CUT, 0.2, 0.95, 0.85), (LENGTH, 300.0, 20.0, 40.0), (REPEATED, 0.1, 0.7, 0.5)],
)
def test_responses_that_lose_themselves(key: str, first: float, then: float, well: float) -> None:
    """Without a score, shrinking says nothing; with one that rose it is what was asked for."""

    def warnings(values: list[float], scores: list[float]) -> int:
        alarms, said = Alarms(), list[str]()
        for value, score in zip(values, scores, strict=True):
            alarms.check_step({key: value, "critic/score/mean": score}, warming_up=False, warn=said.append)
        return len(said)

    lost = [first] + [then] * DRIFTED_STEPS
    flat = [0.3] * len(lost)
    assert warnings(lost, flat) == 1
    assert warnings(lost[:-1], flat[:-1]) == 0
    assert warnings([first] + [well] * DRIFTED_STEPS, flat) == 0
    assert warnings([then] * len(lost), flat) == 0  # it has always been so
    assert warnings(lost, [0.3] + [0.9] * DRIFTED_STEPS) == (0 if key == LENGTH else 1)


@pytest.mark.parametrize("key", ["actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"])
def test_a_distance_that_gains_nothing(key: str) -> None:
    def warnings(distance: float, scores: list[float]) -> int:
        alarms, said = Alarms(), list[str]()
        for score in scores:
            alarms.check_step({key: distance, "env/return": score}, warming_up=False, warn=said.append)
        return sum("nothing is gained by it" in text for text in said)

    assert warnings(2.0, [0.3] * DRIFTED_STEPS) == 1
    assert warnings(0.5, [0.3] * DRIFTED_STEPS) == 0
    assert warnings(2.0, [0.3] + [0.9] * 9) == 0  # it has learned
    assert warnings(2.0, [0.3, 0.9] + [0.5] * DRIFTED_STEPS) == 1  # and has lost it


@pytest.mark.parametrize(
    ("key", "advised"), [("critic/score/mean", "the weight of the KL"), ("env/return", "target_kl")]
)
def test_warnings_advise_what_the_kind_of_run_has(key: str, advised: str) -> None:
    """Control runs do not read the weight of a KL to a reference, nor text runs a target for the KL of a step."""
    alarms, said = Alarms(), list[str]()
    tested = "eval/return" if key == "env/return" else "val-core/a/reward/mean@1"
    for number, score in enumerate([0.8, 0.8, 0.8, 0.5, 0.5, 0.5, 0.5, 0.5]):
        found = {key: score, "actor/ppo_kl": 2.0, "actor/entropy": 0.0 if number else 2.0}
        alarms.check_step(found, warming_up=False, warn=said.append)
        alarms.check_validation({tested: score}, said.append)
    assert sorted(alarms.active) == ["actor/entropy", "distance", "held-out", "jump"]
    assert len(said) == 4
    assert all(advised in text for text in said)


def falls(tests: list[float], training: list[float]) -> list[int]:
    """Tests, counted from 1, after which they are said to fall."""
    held_out, found = EvaluationHistory(), list[int]()
    for number, (tested, trained) in enumerate(zip(tests, training, strict=True), start=1):
        held_out.add_training_score(trained)
        if (fall := held_out.add_evaluation(number, tested)) and fall.is_clear:
            found.append(number)
    return found


def test_tests_that_fall() -> None:
    """While training rises, or together with it.

    After 15 tests the last three have a mean of 0.1, and the best three before them, (0.6 0.7 0.8), of 0.7.

    The differences without the steepest fall scatter by 0.088. They have so clear a trend that the most correlation is
    allowed for, v = (1 + 0.4 + 0.06) / 0.7, so t is 5.8; with 8.9 degrees of freedom z is 3.63, and of 55 comparisons
    3.57 is asked.
    """
    rises = [0.1 * step for step in range(15)]
    peak = [0.1, 0.2, 0.5, 0.6, 0.7, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert falls(peak, rises) == [15]
    assert falls(peak, peak) == [15]
    assert falls(peak, rises[::-1]) == [15]
    assert falls(peak, [0.5] * 15) == []  # training stays
    assert falls(peak, [*[0.4, 0.6] * 7, 0.4]) == []  # or falls by chance
    assert falls([0.8, 0.8, 0.8, 0.75, 0.75, 0.75], rises[:6]) == []  # a sixteenth of its level
    assert falls([0.8, 0.8, 0.8, 0.5, 0.5, 0.5], rises[:6]) == [6]
    assert falls([0.0] * 12, rises[:12]) == []
    assert falls([0.5, 0.3, 0.6, 0.2, 0.5, 0.3, 0.4, 0.2, 0.5, 0.2, 0.4, 0.3], rises[:12]) == []  # scatter
    assert falls([float("-inf")] * 12, rises[:12]) == []


def shares(draws: random.Random, prompts: int, *chances: float) -> list[float]:
    """Scores of tests of so many prompts, each with its chance to be right."""
    return [sum(draws.random() < chance for _ in range(prompts)) / prompts for chance in chances]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("chance", "prompts"), [(0.3, 50), pytest.param(0.05, 50, marks=SLOW), pytest.param(0.5, 20, marks=SLOW)]
)
def test_tests_that_never_fall_hardly_ever_alarm(chance: float, prompts: int) -> None:
    """Binomial scores of one chance, while training rises by 0.2: the best three before are the best of many."""
    draws, rises = random.Random(1), [0.3 + 0.002 * number for number in range(100)]
    alarmed = sum(bool(falls(shares(draws, prompts, *[chance] * 100), rises)) for _ in range(60))
    assert alarmed < 0.05 * 60


@pytest.mark.parametrize("tests", [20, 100])
def test_tests_that_err_alike_hardly_ever_alarm(tests: int) -> None:
    """Scores of a policy that wanders: each keeps 0.3 of the last one's deviation, while training rises."""
    draws, rises = random.Random(2), [number / tests for number in range(tests)]

    def wander() -> list[float]:
        deviations = [draws.gauss(0, 0.03)]
        while len(deviations) < tests:
            deviations.append(0.3 * deviations[-1] + math.sqrt(1 - 0.3**2) * draws.gauss(0, 0.03))
        return [0.1 + deviation for deviation in deviations]

    alarmed = sum(bool(falls(wander(), rises)) for _ in range(100))
    assert alarmed <= 0.08 * 100  # 0.37 of runs of 100 tests, if they counted as independent


@pytest.mark.parametrize("before", [10, 40])
def test_a_fall_of_both_is_found_soon(before: int) -> None:
    """A policy that loses what it can do, and not only what it had gained."""
    draws, late = random.Random(3), list[int]()
    for _ in range(40):
        tested, trained = (shares(draws, 200, *[0.5] * before, *[0.3] * 12) for _ in range(2))
        found = falls(tested, trained)
        late.append(found[0] - before if found else 99)
    assert statistics.median(late) <= 3
    assert sum(number <= 8 for number in late) >= 0.85 * 40


def test_what_a_fall_says() -> None:
    def said(training: list[float]) -> str:
        alarms, found = Alarms(), list[str]()
        for tested, trained in zip([0.8, 0.8, 0.8, 0.5, 0.5, 0.5], training, strict=True):
            alarms.check_step({"critic/score/mean": trained}, warming_up=False, warn=found.append)
            alarms.check_validation({"val-core/a/reward/mean@1": tested}, found.append)
        (message,) = found
        assert alarms.collapsed_since is not None
        return message

    with_it = said([0.8, 0.8, 0.8, 0.4, 0.4, 0.4])
    assert "evaluation score drops (0.8 around step 3, now 0.5), and so does the training score (0.8 to 0.4)" in with_it
    assert "losing what it had learned. Use the best checkpoint" in with_it
    assert "training score rises (0.1 to 0.4) while" in said([0.1, 0.1, 0.1, 0.4, 0.4, 0.4])


@pytest.mark.parametrize("before", [4, 10, 40])
def test_a_lasting_fall_is_found_soon(before: int) -> None:
    draws, rises, late = random.Random(2), [0.01 * number for number in range(before + 12)], list[int]()
    for _ in range(40):
        found = falls(shares(draws, 200, *[0.5] * before, *[0.3] * 12), rises)
        late.append(found[0] - before if found else 99)
    assert statistics.median(late) <= 3
    assert sum(number <= 8 for number in late) >= 0.9 * 40


def validations(
    scores: list[float], majority: float = 0.3, questions: int = 100, active: list[str] | None = None
) -> int:
    """Warnings of validations with these scores."""
    alarms, spoken = Alarms(active=active or [], since=dict.fromkeys(active or [], 1)), list[str]()
    for score in scores:
        prefix = "val-aux/count/letters"
        metrics = {"distinct_mean": score, "majority_answer": majority, "num_distinct": questions}
        alarms.check_validation({f"{prefix}/{name}": value for name, value in metrics.items()}, spoken.append)
    assert all("count/letters is" in text for text in spoken)
    return len(spoken)


def test_a_score_that_stays_at_the_majority_answers() -> None:
    assert validations([0.3] * MAJORITY_EVALUATIONS) == 1
    assert validations([0.3] * (MAJORITY_EVALUATIONS - 1)) == 0
    assert validations([0.3], active=["replies"]) == 1  # the replies are the same, too
    assert validations([0.1, 0.2, 0.3, 0.4, 0.5] * 3) == 0  # it passes by
    assert validations([0.3] * 9, questions=10) == 0
    assert validations([1.0] * 9, majority=1.0) == 0  # one answer is right everywhere
    assert validations([0.0] * 9, majority=0.01) == 0  # all answers differ: no share to speak of


def test_a_resumed_run_dates_a_validation_by_its_own_step() -> None:
    alarms = Alarms()
    alarms.load_state_dict(Alarms(step=7).state_dict())
    metrics = {"distinct_mean": 0.3, "majority_answer": 0.3, "num_distinct": 100}
    for _ in range(MAJORITY_EVALUATIONS):
        alarms.check_validation({f"val-aux/count/{name}": value for name, value in metrics.items()}, lambda _: None)
    assert alarms.collapsed_since == 7


def test_a_resumed_run_says_what_the_uninterrupted_one_says() -> None:
    collapsed = {"critic/score/mean": 0.1, "actor/entropy": 0.0, "actor/grad_norm": 0.0}
    script = [collapsed | {IDENTICAL: 1.0, EXPLAINED: 0.0}] * (CRITIC_STEPS + 2)
    whole: list[tuple[int, str]] = []
    alarms = Alarms()
    states: list[dict[str, Any]] = []
    for number, metrics in enumerate(script):
        states.append(copy.deepcopy(alarms.state_dict()))
        alarms.check_step(metrics, warming_up=False, warn=lambda text, at=number: whole.append((at, text)))
    assert len(whole) == 3
    for cut, state in enumerate(states):
        resumed, said = Alarms(), list[str]()
        resumed.load_state_dict(state)
        for metrics in script[cut:]:
            resumed.check_step(metrics, warming_up=False, warn=said.append)
        assert said == [text for at, text in whole if at >= cut]
        assert resumed.state_dict() == alarms.state_dict()


COLLAPSED = "the policy has collapsed: actor/entropy is 0 and actor/"
SAME_REPLY = "of the responses to different prompts are the same reply"
BLIND = f"the critic has explained nothing of the returns for {CRITIC_STEPS} steps"
JUMP = "the update of this step moved the policy by "
MESSAGES = {
    "healthy text": [],
    "a rate that kills": [JUMP, "the policy has collapsed: actor/entropy is 5.6 and actor/grad_norm 0"],
    "a rate and a decay that kill": [JUMP, f"{COLLAPSED}grad_norm 0"],
    "one letter": [SAME_REPLY, "the validation score of tiny/letters is 0.500, and always giving the most"],
    "paid for what is not meant": ["the training score rises (", SAME_REPLY],
    "paid for loops": [
        "of the responses are truncated by data.max_response_length", SAME_REPLY, "responses are repetitive: ",
    ],
    "silence": ["nats per token away (actor/kl_loss)", "responses have shrunk from", SAME_REPLY],
    "scores that are alike": ["all advantages have been 0"],
    "a blind critic of text": [BLIND],
    "healthy control": [],
    "a blind critic of control": [BLIND],
    "a dead policy": [f"{COLLAPSED}policy_grad_norm 0"],
    "a dead policy that shares its critic": [f"{COLLAPSED}policy_grad_norm 0"],
    "a dead policy with a memory": [f"{COLLAPSED}policy_grad_norm 0"],
    "a healthy pendulum": [],
    "a policy that runs away": [JUMP, "nats per token away (actor/ppo_kl)"],
}  # fmt: skip
"""What alarms say about each of the recorded runs, in this order, and nothing else."""


def warnings_about(steps: list[dict[str, float]]) -> list[str]:
    """Show the metrics of a run to alarms, each once as a step and once as a validation, as a run does."""
    alarms, said = Alarms(), list[str]()
    for metrics in steps:
        alarms.check_step(metrics, warming_up=False, warn=said.append)
        alarms.check_validation(metrics, said.append)
    return said


@pytest.mark.parametrize("name", RUNS)
def test_recorded_runs_are_warned_about(name: str) -> None:
    """Metrics of real runs, with the names and the noise that these have."""
    said = warnings_about(recorded()[name])
    assert len(said) == len(MESSAGES[name]), said
    assert all(message in text for message, text in zip(MESSAGES[name], said, strict=True)), said


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_today_are_warned_about(name: str, tmp_path: Path) -> None:
    """As those that were recorded: metrics that changed would leave the records behind."""
    said = warnings_about(metrics_of(name, tmp_path))
    assert all(any(message in text for text in said) for message in MESSAGES[name]), said
    assert bool(said) == bool(MESSAGES[name]), said


@pytest.fixture
def _worthless() -> Iterator[None]:
    with register_objects({"worthless": lambda **row: 0.0}):
        yield


@pytest.mark.usefixtures("_worthless")
@pytest.mark.parametrize("kind", ["text", "control"])
def test_a_collapse_stops_the_run_if_asked_and_changes_no_step(
    kind: str, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the same run goes on to its end: the negative control. Resumed, the stopped one does too, bitwise,
    and knows that it has spoken.
    """
    loop: Loop = Text(inputs, *LIGHT) if kind == "text" else Control()
    last = 5 if kind == "text" else 12  # returns vary until one is far enough below the best
    settings = [f"trainer.total_training_steps={last}", f"trainer.save_freq={last}", "trainer.test_freq=-1"]
    if kind == "text":  # hardly any entropy, and no score to learn from
        settings += [*GRPO, f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.ppo_epochs=1", "actor_rollout_ref.rollout.n=2"]
        settings += ["algorithm.use_kl_in_reward=False", "actor_rollout_ref.rollout.temperature=1e-3"]
        settings += ["custom_reward_function.path=object:worthless"]
    stops = loop.overrides(tmp_path / "stops", *settings, "trainer.on_collapse=stop")
    before = kill if kind == "control" else lambda run: None
    whole = loop.train(loop.overrides(tmp_path / "warns", *settings), before=before)
    assert (whole.trainer.step_number, whole.trainer.stopped_by) == (last, None)
    assert "the policy has collapsed" in caplog.text
    assert "on_collapse" not in caplog.text

    stopped = loop.train(stops, before=before)
    at = stopped.trainer.step_number
    assert COLLAPSED_STEPS <= at < last
    assert stopped.trainer.stopped_by == "trainer.on_collapse"
    assert caplog.text.count("trainer.on_collapse=stop: the run is saved and stops") == 1
    assert [path.name for path in stopped.directory.glob("global_step_*")] == [f"global_step_{at}"]

    resumed = loop.train(stops)
    assert (resumed.trainer.step_number, resumed.trainer.stopped_by) == (last, None)
    assert resumed.trainer.alarms.state_dict() == whole.trainer.alarms.state_dict()
    assert_same_run(whole.directory, resumed.directory, last)


def test_a_command_that_ends_by_a_collapse_says_so_to_what_called_it(tmp_path: Path) -> None:
    """`tether train ... && tether eval ...` does not go on with such a policy."""
    settings = [
        "env.train.id=CartPole-v1", "env.train.total_num_envs=8", "actor_rollout_ref.actor.optim.lr=3",
        "trainer.on_collapse=stop", "trainer.total_training_steps=20", "trainer.preflight=False", "trainer.logger=file",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["train", *settings])
    assert re.search(r"stopped by trainer.on_collapse after step \d+ of 20: the policy\s+has\s+collapsed", done.output)
    assert done.exit_code == 3
