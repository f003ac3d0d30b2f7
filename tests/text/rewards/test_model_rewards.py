"""A model of this process as a reward: its order, and what is no score."""

import math

import pytest

from tether.text.rewards.outcome import Abstention, RewardError, RewardRequest, Score
from tether.text.rewards.service import ModelRewards

SCORES = {"good": 2.0, "bad": -1.0, "long": RewardError("too long"), "none": Abstention()}
REQUESTS = [RewardRequest("mine", text, None) for text in SCORES]


def model(requests):
    return [SCORES[request.solution_str] for request in requests]


def test_outcomes_are_in_order():
    rewards = ModelRewards(model)
    assert rewards.score(REQUESTS) == [Score(2.0), Score(-1.0), RewardError("too long"), Abstention()]
    assert len(rewards.durations) == 4
    assert rewards.score([]) == []
    rewards.submit(7, REQUESTS[0])
    rewards.submit(2, REQUESTS[1])
    assert rewards.collect() == [Score(-1.0), Score(2.0)]


@pytest.mark.parametrize("score", [math.nan, math.inf, -1e39])
def test_what_is_no_number_is_never_a_score(score):
    (result,) = ModelRewards(lambda requests: [score]).score(REQUESTS[:1])
    assert isinstance(result, RewardError)
    assert "a score must be finite" in result.message
