import inspect
import re

import pytest

from tether.text.rewards.outcome import RewardRequest, Score
from tether.text.rewards.rules import bounded
from tether.text.rewards.rules.reasoning_answers import EVALUATED_TASKS, EXPRESSION_TASKS, NUMBER_TASKS
from tether.text.rewards.rules.reasoning_gym import score
from tether.text.rewards.service.pool import RewardPool


def create_dataset(task: str, **params: object):
    import reasoning_gym  # and what its tasks need: half a second

    return reasoning_gym.create_dataset(task, **params)


TO_24 = {"numbers": [5, 1, 2, 8]}
TO_309 = {"numbers": [6, 61, 94, 4], "target": 309}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def row(task, answer, extract="last_number", params=None, metadata=None):
    entry = {"question": "?", "answer": answer, "metadata": metadata or {}}
    return {"split": "train", "index": 0, "reasoning_gym": {
        "task": task, "params": params or {}, "entry": entry, "extract": extract,
    }}  # fmt: skip


def test_the_last_number_is_right_or_wrong():
    scores = {
        "3": 1.0,
        "4 - 1 = 3.": 1.0,
        "+3": 1.0,
        "3, no, 4": 0.0,
        "13": 0.0,  # contains the answer, but is another number
        "-3": 0.0,
        "3.0": 1.0,
        "three": 0.0,
        "": 0.0,
    }
    extra_info = row("chain_sum", "3", params=SUMS)
    assert {reply: score("reasoning_gym/chain_sum", reply, None, extra_info) for reply in scores} == scores


def test_a_task_with_its_own_scorer():
    scores = {
        "<answer>94*4 - 61 - 6</answer>": 1.0,
        "<answer>309</answer>": 0.05,  # the task's own scorer: parses, but does not use the numbers
        "94*4 - 61 - 6": 0.0,
    }
    extra_info = row("countdown", "94*4 - 61 - 6", "answer_tag", metadata=TO_309)
    assert {reply: score("reasoning_gym/countdown", reply, None, extra_info) for reply in scores} == scores


def test_the_whole_reply_may_earn_a_part():
    extra_info = row("chain_sum", "3", "full", SUMS)
    assert score("reasoning_gym/chain_sum", " 3\n", None, extra_info) == 1.0
    assert score("reasoning_gym/chain_sum", "it: 3", None, extra_info) == pytest.approx(1 / 5)


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match=r"first_number.*last_number, answer_tag, first_word, full"):
        score("reasoning_gym/chain_sum", "3", None, row("chain_sum", "3", "first_number"))
    with pytest.raises(ValueError, match="no_such_task"):
        score("reasoning_gym/no_such_task", "3", None, row("no_such_task", "3"))


def test_the_tasks_own_answers_score_one_in_the_pool():
    extract = {"chain_sum": "last_number", "gcd": "last_number", "leg_counting": "last_number", "countdown": "full"}
    requests = [
        RewardRequest(
            f"reasoning_gym/{task}", entry["answer"], None, row(task, entry["answer"], how, metadata=entry["metadata"])
        )
        for task, how in extract.items()
        for entry in create_dataset(task, size=5, seed=1)
    ]
    with RewardPool(num_workers=1, timeout=20) as pool:
        assert pool.score(requests) == [Score(1.0)] * 20


def test_the_first_word_is_right_or_wrong():
    scores = {"Kaylum.": 1.0, "Kaylum, not Elyan": 1.0, "Elyan or Kaylum": 0.0}
    params = {"min_num_statements": 2, "max_num_statements": 4}
    entry = row("needle_haystack", "Kaylum", extract="first_word", params=params)
    assert {reply: score("reasoning_gym", reply, "Kaylum", entry) for reply in scores} == scores


EVALUATED = sorted(EVALUATED_TASKS | EXPRESSION_TASKS | NUMBER_TASKS)


def test_every_task_that_evaluates_answers_is_known():
    """Another version of the package may have more of them."""
    result = set()
    from reasoning_gym.factory import DATASETS

    for task, (dataset, _) in DATASETS.items():
        source = inspect.getsource(dataset.score_answer)
        if re.search(r"\beval\(|\bexec\(|parse_expr\(|sympify\(", source):
            result.add(task)
    assert result - {"number_sorting"} == set(EVALUATED)  # which evaluates the row's own answer


CODE = [
    "__import__('pathlib').Path({file!r}).touch()",
    "[__import__('pathlib').Path({file!r}).touch()]",
    "sin(__import__('pathlib').Path({file!r}).touch())",
    "sin('open(str({file!r}), chr(119))')",
    "(lambda: open({file!r}, 'w'))()",
    "[open({file!r}, 'w') for _ in [1]]",
    "open({file!r}, 'w')!",
    " open({file!r}, 'w')",
    "f'{{open({file!r}, chr(119))}}'",
]


@pytest.mark.parametrize("task", EVALUATED)
def test_no_answer_is_run(task, tmp_path):
    entry = create_dataset(task, size=1, seed=0)[0]
    extra_info = row(task, entry["answer"], "full", metadata=entry["metadata"])
    for index, code in enumerate(CODE):
        answer = code.format(file=str(tmp_path / str(index)))
        assert score(f"reasoning_gym/{task}", answer, None, extra_info) <= 0.05, code
    assert [CODE[int(written.name)] for written in tmp_path.iterdir()] == []


def test_the_check_notices_an_answer_that_is_run(tmp_path):
    """The negative control: the package's own scorer runs it."""
    tasks = create_dataset("countdown", size=1, seed=0)
    tasks.score_answer(f"open({str(tmp_path / 'written')!r}, 'w')", tasks[0])
    assert (tmp_path / "written").exists()


def test_answers_cannot_read_what_is_expected():
    entry = create_dataset("string_insertion", size=1, seed=0)[0]
    code = "__import__('sys')._getframe(1).f_locals['entry']['answer']"
    assert score("reasoning_gym/string_insertion", code, None, row("string_insertion", entry["answer"], "full")) == 0.0


@pytest.mark.parametrize("task", EVALUATED)
def test_the_own_answers_of_tasks_that_evaluate_them_are_right(task):
    for entry in create_dataset(task, size=5, seed=1):
        extra_info = row(task, entry["answer"], "full", metadata=entry["metadata"])
        assert score(f"reasoning_gym/{task}", entry["answer"], None, extra_info) == 1.0


def test_lists_earn_their_part():
    entry = create_dataset("string_insertion", size=1, seed=0)[0]
    extra_info = row("string_insertion", entry["answer"], "full")
    assert score("reasoning_gym/string_insertion", str(list(entry["answer"])), None, extra_info) == 0.1


def points(task, reply, seed=0, **changed):
    """Of a reply to the first question of a task."""
    entry = create_dataset(task, size=1, seed=seed)[0] | changed
    extra_info = {"reasoning_gym": {"task": task, "params": {}, "entry": entry, "extract": "full"}}
    return score(f"reasoning_gym/{task}", reply, None, extra_info)


ENDLESS = [
    ("countdown", "9**9**9**9"),
    ("countdown", "1e-999999999"),
    ("simple_integration", "factorial(10**9)"),
    ("coin_flip", "1e999999999"),
    ("propositional_logic", "¬" * 5000 + "P"),
    ("rubiks_cube", "U99999999"),
    ("rush_hour", "F+99999999"),
]


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_is_a_wrong_one(monkeypatch):
    points("coin_flip", "319/512", answer="0.623046875")  # imports what scorers need
    monkeypatch.setattr(bounded, "MAX_SECONDS", 0.2)
    assert points("coin_flip", "319/512", answer="0.623046875") == 1.0
    assert [(task, answer[:20]) for task, answer in ENDLESS if points(task, answer) > 0.05] == []


RAISING = [
    ("boxnet", "[1]"),
    ("calendar_arithmetic", "1" * 4000),
    ("coin_flip", "1" * 4000),
    ("game_of_life", "{}"),
    ("prime_factorization", "I do not know"),
    ("prime_factorization", "2 × 2.5"),
    ("propositional_logic", "(A ∧ " * 600 + "A" + ")" * 600),
    ("time_intervals", "1" * 4000 + ":00"),
]


def test_an_answer_that_makes_a_scorer_raise_is_a_wrong_one():
    result = {(task, answer, seed): points(task, answer, seed) for task, answer in RAISING for seed in range(5)}
    assert [case for case, score in result.items() if score > 0.05] == []


def test_a_row_that_makes_a_scorer_raise_is_an_error():
    with pytest.raises(AttributeError, match="lower"):
        points("rectangle_count", "3", answer=None)
    with pytest.raises(ValueError, match="invalid literal"):
        points("prime_factorization", "3", answer="three")


FULL_SCORES = [
    ("coin_flip", "0", 0.0, {}),  # as every probability begins
    ("coin_flip", "0.62", 0.0, {"answer": "0.623046875"}),
    ("coin_flip", "0.62305", 1.0, {"answer": "0.623046875"}),
    ("coin_flip", "319/512", 1.0, {"answer": "0.623046875"}),
    ("complex_arithmetic", "nan", 0.0, {}),
    ("complex_arithmetic", "1 + nani", 0.0, {}),
    ("countdown", "309e0 + 0e0*(6+61+94+4)", 0.01, {"metadata": TO_309}),
    ("countdown", "0x135 + 0x0*(6+61+94+4)", 0.01, {"metadata": TO_309}),
    ("countdown", "3_0_9 + 0_0*(6+61+94+4)", 0.0, {"metadata": TO_309}),
    ("countdown", "floor(pi)*(6+61+94+4)", 0.01, {"metadata": TO_309}),
    ("countdown", " (94 * 4) - (61 + 6.)", 1.0, {"metadata": TO_309}),
    ("game_of_life_halting", "True", 0.0, {"answer": "False"}),
    ("game_of_life_halting", "no", 0.0, {"answer": "False"}),
    ("game_of_life_halting", "false", 1.0, {"answer": "False"}),
    ("intermediate_integration", "Integral(x*sin(x), x)", 0.0,
     {"metadata": {"integrand": "x*sin(x)", "variable": "x"}}),
    ("intermediate_integration", "sin(x) - x*cos(x) + 3", 1.0,
     {"metadata": {"integrand": "x*sin(x)", "variable": "x"}}),
    ("number_sorting", "['NaN', 'NaN']", 0.0, {"answer": "['1', '7']", "metadata": {"direction": "ascending"}}),
    ("number_sorting", "[1, 7]", 1.0, {"answer": "['1', '7']", "metadata": {"direction": "ascending"}}),
    ("polynomial_equations", "I do not know", 0.0, {"answer": ""}),
    ("polynomial_equations", '""', 1.0, {"answer": ""}),
    ("puzzle24", "8*3*1*1", 0.0, {"metadata": TO_24}),  # right for other numbers
    ("puzzle24", "8*(5 - 2*1)", 1.0, {"metadata": TO_24}),
    ("puzzle24", "8*3 + 1/2", 0.0, {"metadata": {"numbers": [8, 3, 1, 2]}}),  # whose whole part is 24
]  # fmt: skip


def test_a_full_score_is_for_right_answers():
    """The package's own scorers give 1 to each of them."""
    assert [case for case in FULL_SCORES if points(case[0], case[1], **case[3]) != case[2]] == []
