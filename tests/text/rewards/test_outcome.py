import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.text.rewards.outcome import Abstention, RewardError, Score, outcome_of, plain

SCORES = [
    (1, 1.0),
    (0.25, 0.25),
    (True, 1.0),
    (-3, -3.0),
    (Fraction(1, 4), 0.25),
    (np.float32(0.5), 0.5),
    (np.int64(2), 2.0),
    (np.bool_(True), 1.0),
    (np.array(0.5), 0.5),
    (torch.tensor(0.5), 0.5),
    ({"score": np.float64(0.5)}, 0.5),
]


def test_numbers_are_scores():
    for value, score in SCORES:
        outcome = outcome_of(value)
        assert outcome == Score(score)
        assert type(outcome.value) is float


@pytest.mark.parametrize("value", [None, {"score": None}, {"score": None, "pred": "3"}])
def test_none_abstains(value):
    assert outcome_of(value) == Abstention()


NO_SCORES = [
    ("1.0", "str '1.0'"),
    (math.nan, "nan"),
    (-math.inf, "-inf"),
    (np.float32("nan"), "nan"),
    ({}, '"score"'),
    ({"reward": 0.5}, "{'reward': 0.5}"),
    ({"score": "0.5"}, "str '0.5'"),
    ({"score": math.inf}, "inf"),
    ([0.5], "list [0.5]"),
    ((0.5, {}), "tuple (0.5, {})"),
    (np.zeros(2), "ndarray array([0., 0.])"),
    (torch.tensor([0.5]), "Tensor tensor([0.5000])"),
    (1 + 2j, "complex (1+2j)"),
    (Decimal("0.5"), "Decimal('0.5')"),
]


def test_everything_else_is_an_error_that_shows_the_value():
    for value, shown in NO_SCORES:
        outcome = outcome_of(value)
        assert isinstance(outcome, RewardError)
        assert shown in outcome.message


def test_a_long_value_is_shortened():
    assert len(outcome_of("a" * 10_000).message) < 400
    assert len(outcome_of({"text": "a" * 10_000}).message) < 400


def test_extra_keys_become_plain():
    outcome = outcome_of({"score": 1, "acc": np.bool_(False), "steps": (np.int32(1), 2), "of": {3: Fraction(1, 2)}})
    assert outcome == Score(1.0, {"acc": False, "steps": [1, 2], "of": {"3": 0.5}})
    assert type(outcome.extra["steps"][0]) is int


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), lambda inner: st.lists(inner), max_leaves=5
    )
)
def test_plain_values_stay_as_they_are(value):
    assert plain(value) == value
