"""GRPO and GAE learn a small task through the whole trainer. All that should: ``python -m benchmarks.algorithms``."""

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

PAGE = Path(__file__).parents[2] / "docs/evidence/learning.md"
FEW = 12  # of the 40 steps of the table
CASES = {(case.group, case.name): case for case in all_cases()}


def learn(case: Case, folder: Path, seed: int = 1) -> Learned:
    sabotage = SABOTAGES[case.sabotage] if case.sabotage else None
    return train(case.task, case.settings, steps=case.steps, seed=seed, folder=folder, sabotage=sabotage)


def test_the_page_says_how_many_questions_a_score_is_of() -> None:
    assert "`spell` has 6 distinct questions, and a score is the mean over 32 sampled answers" in questions(SPELL)
    text = PAGE.read_text()
    assert all(questions(task) in text for task in (SPELL, LEDGER))


@pytest.mark.parametrize("name", ["grpo", "grpo, flipped"])
def test_a_few_steps_learn_unless_they_are_broken(name: str, tmp_path: Path) -> None:
    """Flipped advantages are the negative control."""
    group = "control" if "flipped" in name else "advantages"
    learned = learn(replace(CASES[group, name], steps=FEW), tmp_path)
    assert learned.start < 0.2
    assert learned.end < 0.1 if group == "control" else learned.end > 2 * learned.start


@pytest.mark.slow
def test_it_learns_with_a_critic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learned = learn(CASES["advantages", "gae"], tmp_path)
    assert learned.start < BROKEN / 2
    assert learned.end >= LEARNED
    assert caplog.text == ""  # no alarm of a run that learns


def test_the_table_has_everything() -> None:
    assert {name for group, name in CASES if group == "advantages"} == set(ADVANTAGE_ESTIMATORS)
    assert {name for group, name in CASES if group == "policy loss"} == set(POLICY_LOSSES)
    assert len(CASES) == len(all_cases())


def test_every_configuration_is_accepted(tmp_path: Path) -> None:
    for case in CASES.values():
        if not case.by_hand:
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


@pytest.mark.slow
def test_the_optimum_is_between_the_reference_and_the_best() -> None:
    heavy, light = best_score(SPELL, 1, beta=100.0), best_score(SPELL, 1, beta=0.01)
    assert heavy == pytest.approx(0.12, abs=0.05)
    assert light == pytest.approx(1.0, abs=0.01)
