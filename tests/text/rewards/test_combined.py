"""Several rewards at once: the weighted sum, each part apart, and what has no score."""

from typing import Any

from tether.text.rewards.outcome import Abstention, RewardError, RewardOutcome, RewardRequest, Score
from tether.text.rewards.service import CombinedRewards, LocalRewards, ModelRewards, WeightedReward


def by_text(outcomes: dict[str, Any]) -> ModelRewards:
    return ModelRewards(lambda requests: [outcomes[request.solution_str] for request in requests])


def combined(first: Any, second: Any, weights=(1.0, 0.5), optional=(False, False)) -> RewardOutcome:
    rewards = [by_text({"x": value}) for value in (first, second)]
    rewards_by_name = {
        name: WeightedReward(*options) for name, *options in zip(("a", "b"), rewards, weights, optional, strict=True)
    }
    return CombinedRewards(rewards_by_name).score([RewardRequest("mine", "x", None)])[0]


FAILED, NONE = RewardError("too long", "trace"), Abstention()


def test_the_score_is_the_weighted_sum_and_has_each_part() -> None:
    assert combined(2.0, 3.0) == Score(3.5, {"a": 2.0, "b": 3.0})
    assert combined(2.0, 3.0, weights=(-1.0, 0.0)) == Score(-2.0, {"a": 2.0, "b": 3.0})


def test_what_the_first_part_says_keeps_its_name() -> None:
    first, second = Score(1.0, {"acc": True}), Score(0.0, {"acc": False, "why": "short"})
    extra = {"acc": True, "b/acc": False, "b/why": "short", "a": 1.0, "b": 0.0}
    assert combined(first, second) == Score(1.0, extra)


def test_a_part_hides_nothing_that_the_first_one_says() -> None:
    assert combined(Score(1.0, {"b": 7}), 3.0) == Score(2.5, {"a/b": 7, "a": 1.0, "b": 3.0})


WITHOUT_SCORE = [
    (FAILED, 1.0, (False, False), RewardError("part a: too long", "trace")),
    (1.0, FAILED, (True, True), RewardError("part b: too long", "trace")),  # never passed over
    (NONE, FAILED, (False, False), RewardError("part b: too long", "trace")),
    (NONE, 1.0, (False, False), NONE),
    (1.0, NONE, (True, False), NONE),
    (NONE, 4.0, (True, False), Score(2.0, {"b": 4.0})),
    (1.0, NONE, (False, True), Score(1.0, {"a": 1.0})),
    (NONE, NONE, (True, True), NONE),
    (3e38, 1e39, (False, False), RewardError),
    (3e38, 3e38, (False, False), RewardError),  # each fits, the sum does not
]


def test_what_has_no_score() -> None:
    for first, second, optional, wanted in WITHOUT_SCORE:
        summed = combined(first, second, optional=optional)
        assert summed == wanted if not isinstance(wanted, type) else isinstance(summed, wanted)


def test_a_part_that_is_only_watched_is_no_score_by_itself() -> None:
    assert combined(NONE, 4.0, weights=(1.0, 0.0), optional=(True, False)) == NONE


def test_parts_score_the_rows_of_their_sources_in_order() -> None:
    def letters(data_source, solution_str, ground_truth, extra_info):
        return float(len(solution_str))

    rewards_by_name = {
        "math": WeightedReward(by_text({"one": 1.0, "three": 3.0}), data_sources=frozenset({"m"})),
        "length": WeightedReward(LocalRewards(letters, 5.0), 10.0, data_sources=frozenset({"t", "b"})),
        "all": WeightedReward(by_text({"one": 0.5, "two": 0.25, "three": 0.125}), 0.0),
    }
    rewards = CombinedRewards(rewards_by_name)
    rewards.submit(9, RewardRequest("m", "three", None))
    rewards.submit(4, RewardRequest("t", "two", None))
    rewards.submit(1, RewardRequest("m", "one", None))
    summed = rewards.collect()
    assert [outcome.value for outcome in summed] == [1.0, 30.0, 3.0]
    assert summed[1].extra == {"length": 3.0, "all": 0.25}
    assert len(rewards.durations) == 3
    assert rewards.collect() == []
