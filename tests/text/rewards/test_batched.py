"""One call for all responses of a step: scores, what is no score, and a call that does not come back."""

from pathlib import Path

import pytest

from tether.text.rewards.custom import LISTS, CustomReward, load_reward_function
from tether.text.rewards.outcome import Abstention, RewardError, RewardRequest, Score
from tether.text.rewards.service import BatchedRewards

FILE = '''
import os, time
import numpy

class Table:
    """As a DataFrame, which gives the names of its columns."""
    ndim = 2

    def __iter__(self):
        return iter([0, 1])

MADE = {
    "values": lambda scores: dict(enumerate(scores)).values(),
    "keys": lambda scores: dict.fromkeys(scores).keys(),
    "set": set,
    "frozenset": frozenset,
    "bytes": lambda scores: bytes([1, 2]),
    "mapping": lambda scores: os.environ.__class__({}, *[lambda x: x] * 4),
    "table": lambda scores: Table(),
    "array": numpy.array,
    "tuple": tuple,
    "iterator": iter,
}

def rank(data_sources, solution_strs, ground_truths, extra_infos, best=1.0):
    """The longest response has `best`."""
    if "raise" in solution_strs:
        raise RuntimeError("no")
    if "exit" in solution_strs:
        os._exit(3)
    if "hang" in solution_strs:
        time.sleep(60)
    if "short" in solution_strs:
        return [1.0]
    if "dict" in solution_strs:
        return {"score": 1.0}
    if solution_strs[0] in MADE:
        return MADE[solution_strs[0]]([1.0, 2.0])
    longest = max(map(len, solution_strs))
    known = {"none": None, "nan": float("nan")}
    return [
        known.get(text, {"score": best * (len(text) == longest), "row": info["row"], "truth": truth, "from": source})
        for source, text, truth, info in zip(data_sources, solution_strs, ground_truths, extra_infos)
    ]

def of_one(data_source, solution_str, ground_truth, extra_info):
    return 1.0
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batched") / "rank.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def rewards(file: Path):
    with BatchedRewards(CustomReward(str(file), "rank", {"best": 2.0}), timeout=5) as made:
        yield made


def rows(*texts: str) -> list[RewardRequest]:
    return [RewardRequest("mine", text, f"truth {n}", {"row": n}) for n, text in enumerate(texts)]


def test_all_responses_are_seen_at_once_in_the_order_of_their_indices(rewards: BatchedRewards) -> None:
    for index, request in reversed(list(enumerate(rows("abc", "ab", "none", "abcde")))):
        rewards.submit(index, request)
    outcomes = rewards.collect()
    assert [outcome.value if isinstance(outcome, Score) else outcome for outcome in outcomes] == [0, 0, Abstention(), 2]
    assert outcomes[3] == Score(2.0, {"row": 3, "truth": "truth 3", "from": "mine"})
    assert len(rewards.durations) == 4
    assert rewards.collect() == []


def test_an_item_that_is_no_score_is_an_error_of_its_response(rewards: BatchedRewards) -> None:
    first, second = rewards.score(rows("nan", "ab"))
    assert isinstance(first, RewardError)
    assert isinstance(second, Score)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "raised RuntimeError: no"),
        ("exit", "ended with exit code 3"),
        ("short", "returned 1 items for 2 responses"),
        ("dict", "returned dict for 2 responses"),
        ("values", "returned dict_values for 2 responses; return a list"),
        ("keys", "returned dict_keys for 2 responses; return a list"),
        ("set", "returned set for 2 responses; return a list"),
        ("frozenset", "returned frozenset for 2 responses; return a list"),
        ("bytes", "returned bytes for 2 responses; return a list"),
        ("mapping", "returned _Environ for 2 responses; return a list"),
        ("table", "returned Table for 2 responses; return a list"),
    ],
)
def test_a_call_that_fails_is_an_error_of_every_response_and_the_next_one_goes_on(
    rewards: BatchedRewards, text: str, message: str
) -> None:
    outcomes = rewards.score(rows(text, "ab"))
    assert [message in outcome.message for outcome in outcomes if isinstance(outcome, RewardError)] == [True, True]
    assert isinstance(rewards.score(rows("ab"))[0], Score)


@pytest.mark.parametrize("text", ["array", "tuple", "iterator"])
def test_what_has_an_order_is_a_list_of_scores(rewards: BatchedRewards, text: str) -> None:
    assert rewards.score(rows(text, "ab")) == [Score(1.0), Score(2.0)]


def test_a_call_that_hangs_is_killed(file: Path) -> None:
    with BatchedRewards(CustomReward(str(file), "rank"), timeout=1) as rewards:
        outcomes = rewards.score(rows("hang", "ab"))
        assert all(isinstance(outcome, RewardError) for outcome in outcomes)
        assert len(outcomes) == 2


def test_a_function_of_one_response_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"called by keyword as of_one\(data_sources, solution_strs, "):
        load_reward_function(file, "of_one", {}, arguments=LISTS)
