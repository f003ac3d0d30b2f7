"""Algorithms learn a small task through the whole trainer; broken ones do not. All of them: `benchmarks.algorithms`."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.algorithms.cases import BROKEN, LEARNED, Case, all_cases
from benchmarks.algorithms.optimum import answers, best_score
from benchmarks.algorithms.report import Row, questions
from benchmarks.algorithms.sabotage import SABOTAGES
from benchmarks.algorithms.tasks import LEDGER, SPELL, Learned, overrides, train
from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tether.config import load_config

PAGE = Path(__file__).parents[2] / "docs" / "learning.md"
CASES = {(case.group, case.name): case for case in all_cases()}


def learn(case: Case, folder: Path, seed: int = 1) -> Learned:
    sabotage = SABOTAGES[case.sabotage] if case.sabotage else None
    return train(case.task, case.settings, steps=case.steps, seed=seed, folder=folder, sabotage=sabotage)


def test_the_page_says_how_many_questions_a_score_is_of() -> None:
    assert "`spell` has 6 distinct questions, and a score is the mean over 32 sampled answers" in questions(SPELL)
    text = PAGE.read_text()
    assert all(questions(task) in text for task in (SPELL, LEDGER))


@pytest.mark.parametrize(
    "key",
    [("advantages", "gae"), ("advantages", "grpo"), pytest.param(("policy loss", "gspo"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_it_learns(key: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learned = learn(CASES[key], tmp_path)
    assert learned.start < BROKEN / 2
    assert learned.end >= LEARNED
    assert caplog.text == ""  # no alarm of a run that learns


@pytest.mark.parametrize("name", ["grpo, flipped", pytest.param("grpo, shuffled", marks=pytest.mark.slow)])
def test_a_broken_run_does_not(name: str, tmp_path: Path) -> None:
    assert learn(CASES["control", name], tmp_path).end <= BROKEN


def test_the_same_seed_learns_the_same(tmp_path: Path) -> None:
    short = replace(CASES["advantages", "grpo"], steps=4)
    first, second = (learn(short, tmp_path / name) for name in ("first", "second"))
    assert (first.start, first.end, first.curve) == (second.start, second.end, second.curve)


def test_the_table_has_everything() -> None:
    assert {name for group, name in CASES if group == "advantages"} == set(ADVANTAGE_ESTIMATORS)
    assert {name for group, name in CASES if group == "policy loss"} == set(POLICY_LOSSES)
    assert len(CASES) == len(all_cases())


@pytest.mark.parametrize("case", [case for case in CASES.values() if not case.by_hand], ids=lambda case: case.name)
def test_every_configuration_is_accepted(case: Case, tmp_path: Path) -> None:
    load_config(None, [*overrides(case.task, case.steps, 1, tmp_path), *case.settings])


def test_verdicts() -> None:
    def row(ends: list[float], **bound: float) -> Row:
        case = Case("name", "group", SPELL, **bound)
        return Row(case, [Learned(0.1, end, [], 1.0) for end in ends], [0.6] * len(ends))

    assert row([0.7, 0.8], at_least=0.7).passed
    assert not row([0.69, 1.0], at_least=0.7).passed
    assert row([0.1, 0.2], at_most=0.2).passed
    assert not row([0.0, 0.21], at_most=0.2).passed
    assert row([0.55, 0.65], beta=0.1).passed
    assert not row([0.6, 0.75], beta=0.1).passed


def test_all_answers_are_counted() -> None:
    """Nine tokens, one of them the end: 1 + 8 + 64 + 512 answers that end, 4096 that are cut."""
    assert len(answers(4)) == 1 + 8 + 64 + 512 + 8**4


def test_the_optimum_is_between_the_reference_and_the_best() -> None:
    heavy, light = best_score(SPELL, 1, beta=100.0), best_score(SPELL, 1, beta=0.01)
    assert heavy == pytest.approx(0.12, abs=0.05)
    assert light == pytest.approx(1.0, abs=0.01)
