"""A reward model alone, and with rules beside it: whose score counts, and what has none."""

import math

import pytest

from tether.rewards import RewardError, RewardRequest, Score
from tether.rewards.outcome import Abstention
from tether.rewards.service import LocalRewards, ModelRewards

REQUESTS = [RewardRequest("mine", text, None) for text in ("good", "bad", "none", "raises")]
FAILED = RewardError("too long")


def model(requests):
    return [{"good": 2.0, "bad": -1.0, "none": 0.5, "raises": 0.25}[request.solution_str] for request in requests]


def rule(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raises":
        raise KeyError(solution_str)
    return None if solution_str == "none" else {"score": float(solution_str == "good"), "acc": 1.0}


def test_the_model_replaces_the_rules():
    rewards = ModelRewards(model, None, 0.0)
    assert rewards.score(REQUESTS) == [Score(2.0), Score(-1.0), Score(0.5), Score(0.25)]
    assert len(rewards.durations) == 4
    assert rewards.score([]) == []


def test_the_sum_has_both_parts_apart():
    rewards = ModelRewards(model, LocalRewards(rule, 5.0), 10.0)
    good, bad, none, raises = rewards.score(REQUESTS)
    assert good == Score(12.0, {"acc": 1.0, "model_score": 2.0, "rule_score": 1.0})
    assert bad == Score(-1.0, {"acc": 1.0, "model_score": -1.0, "rule_score": 0.0})
    assert none == Abstention()
    assert isinstance(raises, RewardError)


@pytest.mark.parametrize(("text", "kept"), [("good", FAILED), ("none", FAILED)])
def test_an_error_of_the_model_is_one_of_the_row(text, kept):
    rewards = ModelRewards(lambda requests: [FAILED for _ in requests], LocalRewards(rule, 5.0), 1.0)
    assert rewards.score([RewardRequest("mine", text, None)]) == [kept]


@pytest.mark.parametrize("score", [math.nan, math.inf, -1e39])
def test_what_is_no_number_is_never_a_score(score):
    (found,) = ModelRewards(lambda requests: [score], None, 0.0).score(REQUESTS[:1])
    assert isinstance(found, RewardError)
    assert "no score" in found.message


def test_a_sum_beyond_float32_is_an_error():
    (found,) = ModelRewards(lambda requests: [3e38], LocalRewards(rule, 5.0), 3e38).score(REQUESTS[:1])
    assert isinstance(found, RewardError)


def test_outcomes_are_ordered_by_index():
    rewards = ModelRewards(model, LocalRewards(rule, 5.0), 1.0)
    rewards.submit(7, REQUESTS[0])
    rewards.submit(2, REQUESTS[1])
    assert [outcome.value for outcome in rewards.collect()] == [-1.0, 3.0]
