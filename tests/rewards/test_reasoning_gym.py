import inspect
import re

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from tether.rewards.outcome import RewardRequest, Score
from tether.rewards.rules.reasoning_gym import BY_EVAL, BY_SYMPY, score
from tether.rewards.service.pool import RewardPool

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def row(task, answer, extract="last_number", params=None, metadata=None):
    entry = {"question": "?", "answer": answer, "metadata": metadata or {}}
    return {"split": "train", "index": 0, "reasoning_gym": {
        "task": task, "params": params or {}, "entry": entry, "extract": extract,
    }}  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("3", 1.0),
        ("4 - 1 = 3.", 1.0),
        ("+3", 1.0),
        ("3, no, 4", 0.0),
        ("13", 0.0),  # contains the answer, but is another number
        ("-3", 0.0),
        ("3.0", 1.0),
        ("three", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_is_right_or_wrong(reply, expected):
    assert score("reasoning_gym/chain_sum", reply, None, row("chain_sum", "3", params=SUMS)) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<answer>94*4 - 61 - 6</answer>", 1.0),
        ("<answer>309</answer>", 0.05),  # the task's own scorer: parses, but does not use the numbers
        ("94*4 - 61 - 6", 0.0),
    ],
)
def test_a_task_with_its_own_scorer(reply, expected):
    metadata = {"numbers": [6, 61, 94, 4], "target": 309}
    extra_info = row("countdown", "94*4 - 61 - 6", "answer_tag", metadata=metadata)
    assert score("reasoning_gym/countdown", reply, None, extra_info) == expected


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
        for entry in reasoning_gym.create_dataset(task, size=5, seed=1)
    ]
    with RewardPool(num_workers=1, timeout=20) as pool:
        assert pool.score(requests) == [Score(1.0)] * 20


@pytest.mark.parametrize(
    ("reply", "expected"), [("Kaylum.", 1.0), ("Kaylum, not Elyan", 1.0), ("Elyan or Kaylum", 0.0)]
)
def test_the_first_word_is_right_or_wrong(reply, expected):
    entry = row(
        "needle_haystack", "Kaylum", extract="first_word", params={"min_num_statements": 2, "max_num_statements": 4}
    )
    assert score("reasoning_gym", reply, "Kaylum", entry) == expected


EVALUATED = sorted(BY_EVAL | BY_SYMPY)


def test_every_task_that_evaluates_answers_is_known():
    """Another version of the package may have more of them."""
    found = set()
    for task, (dataset, _) in DATASETS.items():
        source = inspect.getsource(dataset.score_answer)
        if re.search(r"\beval\(|\bexec\(|parse_expr\(|sympify\(", source):
            found.add(task)
    assert found - {"number_sorting"} == set(EVALUATED)  # which evaluates the row's own answer


@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path({file!r}).touch()",
        "[__import__('pathlib').Path({file!r}).touch()]",
        "sin(__import__('pathlib').Path({file!r}).touch())",
        "sin('open(str({file!r}), chr(119))')",
        "(lambda: open({file!r}, 'w'))()",
        "[open({file!r}, 'w') for _ in [1]]",
        "open({file!r}, 'w')!",
        " open({file!r}, 'w')",
        "f'{{open({file!r}, chr(119))}}'",
    ],
)
@pytest.mark.parametrize("task", EVALUATED)
def test_no_answer_is_run(task, code, tmp_path):
    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    extra_info = row(task, entry["answer"], "full", metadata=entry["metadata"])
    written = tmp_path / "written"
    assert score(f"reasoning_gym/{task}", code.format(file=str(written)), None, extra_info) <= 0.05
    assert not written.exists()


def test_the_check_notices_an_answer_that_is_run(tmp_path):
    """The negative control: the package's own scorer runs it."""
    tasks = reasoning_gym.create_dataset("countdown", size=1, seed=0)
    tasks.score_answer(f"open({str(tmp_path / 'written')!r}, 'w')", tasks[0])
    assert (tmp_path / "written").exists()


def test_answers_cannot_read_what_is_expected():
    entry = reasoning_gym.create_dataset("string_insertion", size=1, seed=0)[0]
    code = "__import__('sys')._getframe(1).f_locals['entry']['answer']"
    assert score("reasoning_gym/string_insertion", code, None, row("string_insertion", entry["answer"], "full")) == 0.0


@pytest.mark.parametrize("task", EVALUATED)
def test_the_own_answers_of_tasks_that_evaluate_them_are_right(task):
    for entry in reasoning_gym.create_dataset(task, size=20, seed=1):
        extra_info = row(task, entry["answer"], "full", metadata=entry["metadata"])
        assert score(f"reasoning_gym/{task}", entry["answer"], None, extra_info) == 1.0


def test_lists_earn_their_part():
    entry = reasoning_gym.create_dataset("string_insertion", size=1, seed=0)[0]
    extra_info = row("string_insertion", entry["answer"], "full")
    assert score("reasoning_gym/string_insertion", str(list(entry["answer"])), None, extra_info) == 0.1


@pytest.mark.parametrize("answer", ["9**9**9**9", "factorial(10**9)"])
def test_an_expression_that_takes_for_ever_is_a_wrong_one(answer):
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    extra_info = row("countdown", entry["answer"], "full", metadata=entry["metadata"])
    assert score("reasoning_gym/countdown", answer, None, extra_info) == 0.01
