"""A reward tried on replies whose worth is known: each way of being wrong is found, a right one has no verdict."""

import math
import re
from collections.abc import Callable

import pytest

from tether.batch import Prompt
from tether.text.rewards.audit import (
    Audit,
    ProbeScores,
    audit,
    deviation_within_groups,
    examples,
    share_of_differing_groups,
    verdicts,
    wrong_answers,
    wrong_replies,
)
from tether.text.rewards.outcome import Abstention, RewardError, RewardRequest, outcome_of
from tether.text.rewards.router import find_reward
from tether.text.rewards.sandbox import ProgramOptions

ANSWERS = ("72", "10", "5", "42", "624", "35", "48", "16")
PROMPTS = [
    Prompt([1], "test", answer, ({"role": "user", "content": f"Question {i}?"},), {}, i)
    for i, answer in enumerate(ANSWERS)
]


UNKNOWN = [
    Prompt([1], "test", truth, ({"role": "user", "content": f"Question {i}?"},), {}, i)
    for i, truth in enumerate(("", None))
]


def tried(reward, prompts=PROMPTS, sampled=(), group_size=1, cut=str) -> Audit:
    def score(requests: list[RewardRequest]):
        outcomes = [reward(r) for r in requests]
        outcome_types = (Abstention, RewardError)
        return [o if isinstance(o, outcome_types) else outcome_of(o) for o in outcomes], [0.001] * len(requests)

    if not sampled:
        return audit(prompts, score, None, group_size, cut=cut)
    repeated_prompts = [prompt for prompt in prompts for _ in range(group_size)][: len(sampled)]
    requests = [
        RewardRequest("test", text, q.ground_truth, {}) for q, text in zip(repeated_prompts, sampled, strict=True)
    ]
    return audit(prompts, score, ProbeScores("sampled", requests, *score(requests)), group_size)


def faults(audited: Audit) -> list[str]:
    return [v.message for v in verdicts(audited) if v.is_fault]


def exact(request: RewardRequest) -> float:
    return float(request.solution_str == request.ground_truth)


def boxed(request: RewardRequest) -> float:
    answers = re.findall(r"\\boxed\{(.*?)\}", request.solution_str)
    return float(bool(answers) and answers[-1] == request.ground_truth)


@pytest.mark.parametrize("reward", [exact, boxed])
def test_a_right_reward_has_no_verdict(reward) -> None:
    audited = tried(reward)
    assert audited.truth.mean == 1
    assert [probe.mean for probe in audited.wrong if probe.kind != "a list of answers"] == [0] * 6
    assert verdicts(audited) == []


def test_the_format_of_the_answer_is_found() -> None:
    assert {r.solution_str for r in tried(boxed).truth.requests} == {f"\\boxed{{{a}}}" for a in ANSWERS}


def test_a_worked_solution_counts_as_the_truth() -> None:
    prompts = [Prompt([1], "test", "tests", (), {"solution": f"def f(): return {i}"}, i) for i in range(4)]
    audited = tried(lambda r: float(r.solution_str == r.extra_info["solution"]), prompts)
    assert audited.truth.mean == 1
    assert verdicts(audited) == []


def test_all_formats_of_gsm8k_are_one_of_those_tried() -> None:
    rule = find_reward("openai/gsm8k", ProgramOptions())
    audited = tried(lambda r: rule("openai/gsm8k", r.solution_str, r.ground_truth, {}))
    assert audited.truth.mean == 1
    assert faults(audited) == []


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (lambda r: 1.0, "the ground truth scores 1, like the wrong replies. If"),
        (lambda r: min(1.0, len(r.solution_str) / 100), "repeated word: scores 1 on average"),
        (lambda r: float(r.ground_truth in r.solution_str), "a list of answers: scores 1 on average"),
        (lambda r: float("correct" in r.solution_str or exact(r)), "praise of itself: scores 1 on average"),
        (lambda r: float(not r.solution_str or exact(r)), "empty: scores 1 on average"),
        (lambda r: float("Question" in r.solution_str or exact(r)), "the prompt: scores 1 on average"),
        (lambda r: float(r.solution_str in ANSWERS), "another row's answer: scores 1 on average"),
        (lambda r: RewardError("boom") if r.solution_str == "" else exact(r), "calls failed; the first: boom"),
        (lambda r: Abstention(), "no ground truth has a score"),
    ],
)
def test_each_way_of_paying_for_what_is_wrong(reward, expected: str) -> None:
    assert any(expected in message for message in faults(tried(reward)))


def test_a_ground_truth_that_is_not_accepted_is_named() -> None:
    audited = tried(lambda r: float(exact(r) and r.ground_truth != "42"))
    (problem,) = verdicts(audited)
    assert not problem.is_fault
    assert problem.message == "1 of 8 ground truths do not score 1; the first: '42'"


def test_most_ground_truths_that_are_refused_are_a_fault() -> None:
    """And none where the best one only has a little more than the others."""
    (problem,) = verdicts(tried(lambda r: float(exact(r) and r.ground_truth == "42")))
    assert problem.is_fault
    assert problem.message == "7 of 8 ground truths do not score 1; the first: '72'"
    (problem,) = verdicts(tried(lambda r: exact(r) * (1 if r.ground_truth == "42" else 0.9)))
    assert not problem.is_fault


@pytest.mark.parametrize("right", [0, 3])
def test_a_reason_of_the_reward_is_shown(right: int) -> None:
    """All solutions are refused, or some."""
    prompts = [Prompt([1], "test", "tests", (), {"solution": f"solution {i}"}, i) for i in range(4)]

    def reward(request: RewardRequest) -> object:
        refused = {"score": 0.0, "reason": "it is in cpp" if "solution" in request.solution_str else "no code"}
        return 1.0 if request.solution_str in [f"solution {i}" for i in range(right)] else refused

    (problem, *_) = verdicts(tried(reward, prompts))
    assert "it is in cpp" in problem.message


def test_the_best_reply_of_each_kind_says_why_it_got_its_score() -> None:
    """The function gives parts and a reason, and pays half for any number; one of four sampled replies is right."""

    def reward(request: RewardRequest) -> dict[str, object]:
        right, number = exact(request), request.solution_str.isdigit()
        reason = "right" if right else "a number" if number else "no number"
        return {"score": max(right, number / 2), "acc": bool(right), "number": float(number), "reason": reason}

    audited = tried(reward, sampled=["72", "9", "none", "none"])
    lines = {line.split(":")[0]: line for line in examples(audited)}
    assert lines["ground truth"] == "ground truth: 1 (acc True, number 1; right): '72'"
    assert lines["another row's answer"] == "another row's answer: 0.5 (acc False, number 1; a number): '10'"
    assert lines["sampled"] == "sampled: 1 (acc True, number 1; right): '72'"
    assert lines["sampled, low"] == "sampled, low: 0 (acc False, number 0; no number): 'none'"
    assert any("'10' (acc False, number 1; a number)" in verdict.message for verdict in verdicts(audited))
    failed = examples(tried(lambda request: RewardError("no such column")))
    assert failed == ["ground truth: RewardError (no such column): '72'"]


def test_sampled_replies() -> None:
    same = tried(exact, sampled=["72", "72", "no", "no"], group_size=2)
    assert share_of_differing_groups(same) == 0
    assert any("in 2 of 2 groups of 2 sampled replies" in verdict.message for verdict in verdicts(same))
    different = tried(exact, sampled=["72", "no", "no", "no"], group_size=2)
    assert share_of_differing_groups(different) == 0.5
    assert verdicts(different) == []
    mostly = tried(exact, sampled=["72", "no", "no", "no", "no", "no", "no", "no"], group_size=2)
    (problem,) = verdicts(mostly)
    assert problem.message.startswith("in 3 of 4 groups of 2 sampled replies, all scores are equal")
    assert not problem.is_fault
    assert "nothing to learn from yet" not in problem.message


def test_the_spread_within_groups() -> None:
    """0 and 1 in the first group, each 0.5 from their mean; 1 and 1 in the second; abstentions count nowhere."""
    audited = tried(exact, sampled=["72", "no", "10", "10"], group_size=2)
    assert deviation_within_groups(audited) == 0.25
    absent = tried(lambda r: exact(r) if r.solution_str else Abstention(), sampled=["", "", "10", "no"], group_size=2)
    assert deviation_within_groups(absent) == 0.5
    assert share_of_differing_groups(absent) == 1  # a group without a score says nothing


def test_hacks_among_sampled_replies() -> None:
    hack = tried(lambda r: 2.0 if r.solution_str == "hack" else exact(r), sampled=["hack", "72"], group_size=2)
    assert faults(hack) == ["sampled replies score 1.5, more than the ground truth (1); for example 'hack'"]


def test_rows_without_a_ground_truth_are_compared_with_sampled_replies() -> None:
    """As for a learned reward model: nothing is called the truth, and what is unusual is no fault."""

    def likes_praise(request: RewardRequest) -> float:
        return 3.0 if "deserves" in request.solution_str else len(request.solution_str) / 100

    audited = tried(likes_praise, UNKNOWN, ["a note", "a longer note"])
    assert audited.truth is None
    assert [probe.kind for probe in audited.rows] == [
        "empty",
        "repeated word",
        "the prompt",
        "praise of itself",
        "sampled",
    ]
    problems = verdicts(audited)
    assert [v.message.split(":")[0] for v in problems] == ["repeated word", "praise of itself"]
    assert "scores 3 on average, sampled replies 0.095 (standard deviation 0.035)" in problems[1].message
    assert not any(v.is_fault for v in problems)
    assert verdicts(tried(lambda r: 1.0, UNKNOWN, ["a note", "a longer note"])) == []


def test_without_ground_truth_and_samples_nothing_is_said_of_the_reward() -> None:
    (problem,) = verdicts(tried(lambda r: len(r.solution_str), UNKNOWN))
    assert "no row has a known right answer" in problem.message
    assert "--samples" in problem.message
    assert not problem.is_fault
    calls: list[RewardRequest] = []
    (failed, _) = verdicts(tried(lambda r: calls.append(r) or RewardError("boom"), UNKNOWN))
    assert len(calls) == len(UNKNOWN)  # of the first kind: each may have taken all of its time
    calls.clear()
    tried(lambda r: calls.append(r) or RewardError("boom"))
    assert len(calls) == len(PROMPTS)
    assert failed.is_fault


def test_tests_without_a_solution_are_no_answer() -> None:
    """As of LiveCodeBench, which publishes none; APPS has an empty one where there is none."""
    tests, source = '{"inputs": ["1"], "outputs": ["1"]}', "livecodebench/code_generation_lite"
    without = [Prompt([1], source, tests, (), extra, i) for i, extra in enumerate(({}, {"solution": ""}))]
    (problem,) = verdicts(tried(lambda r: 0.0, without))
    assert "with tests, extra_info.solution" in problem.message
    assert not problem.is_fault
    solved = Prompt([1], source, tests, (), {"solution": "print(1)"}, 2)
    audited = tried(lambda r: float(r.solution_str == "print(1)"), [*without, solved])
    assert audited.truth
    assert [r.solution_str for r in audited.truth.requests] == ["print(1)"]
    assert verdicts(audited) == []


def test_rows_without_a_ground_truth_have_no_part_in_that_of_others() -> None:
    audited = tried(exact, [*PROMPTS, *UNKNOWN])
    assert audited.truth
    assert [r.solution_str for r in audited.truth.requests] == list(ANSWERS)
    assert verdicts(audited) == []


def test_replies_are_cut_to_what_the_policy_can_write() -> None:
    audited = tried(exact, cut=lambda text: text[:20])
    assert max(len(r.solution_str) for probe in audited.rows for r in probe.requests) == 20


def test_the_replies_that_deserve_nothing_are_never_the_answer() -> None:
    for kind, replies in (
        wrong_replies(PROMPTS) | wrong_answers(PROMPTS, {q.data_source: "{}" for q in PROMPTS})
    ).items():
        assert len(replies) == len(PROMPTS)
        assert not any(reply == answer for reply, answer in zip(replies, ANSWERS, strict=True)), kind


def test_abstentions_are_no_scores() -> None:
    audited = tried(lambda r: Abstention() if r.solution_str == "" else exact(r))
    empty = next(probe for probe in audited.wrong if probe.kind == "empty")
    assert math.isnan(empty.mean)
    assert verdicts(audited) == []


def test_wrong_replies_that_all_abstain_are_no_fault() -> None:
    audited = tried(lambda r: exact(r) or Abstention())
    assert not any(probe.scores for probe in audited.wrong)
    assert verdicts(audited) == []


@pytest.mark.parametrize("sources", [("openai/gsm8k", "lighteval/MATH"), ("lighteval/MATH", "programs")])
def test_rows_of_several_sources_have_formats_of_their_own(sources: tuple[str, str]) -> None:
    """GSM8K beside MATH, and MATH beside programs: with one format for all, half of the truths were told as refused."""

    def solution(source: str, answer: str) -> dict[str, str]:
        return {"answer": f"run {answer}"} if source == "programs" else {}

    prompts = [
        Prompt([1], source, answer, ({"role": "user", "content": "Q"},), solution(source, answer), i)
        for i, (source, answer) in enumerate(zip(sources * 4, ANSWERS, strict=True))
    ]
    rules: dict[str, Callable[[RewardRequest], float]] = {
        "programs": lambda request: float(request.solution_str == f"run {request.ground_truth}"),
        "lighteval/MATH": boxed,
        "openai/gsm8k": lambda request: float(request.solution_str == f"#### {request.ground_truth}"),
    }
    audited = tried(lambda request: rules[request.data_source](request), prompts)
    assert audited.truth is not None
    assert audited.truth.mean == 1
    assert len(audited.truth.requests) == len(prompts)
    assert not verdicts(audited)
