import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.text.rewards.outcome import (
    Abstention,
    RewardError,
    RewardFailure,
    RewardRequest,
    Score,
    check_error_rate,
    extra_metrics,
    percentile,
    summarize,
)

REQUESTS = [RewardRequest("test", f"reply {i}", str(i)) for i in range(8)]
OUTCOMES = [
    Score(1.0, {"acc": True, "pred": "7", "length": 10}),
    Score(0.0, {"acc": False}),
    Abstention(),
    RewardError("first"),
    RewardError("second", "Traceback ...\nKeyError: 3"),
    Score(0.5, {"length": math.inf}),
    RewardError("third"),
    RewardError("fourth"),
]


def test_a_report_counts_and_never_turns_a_failure_into_a_number():
    report = summarize(REQUESTS, OUTCOMES, [0.1 * i for i in range(1, 9)])
    assert [score if score == score else None for score in report.scores] == [
        1.0,
        0.0,
        None,
        None,
        None,
        0.5,
        None,
        None,
    ]
    assert (report.num_scored, report.num_abstained, report.num_failed) == (3, 1, 4)
    assert [(sample.row, sample.error.message) for sample in report.error_samples] == [
        (3, "first"),
        (4, "second"),
        (6, "third"),
    ]
    assert report.metrics == {
        "reward/error_rate": 0.5,
        "reward/abstain_rate": 0.125,
        "reward/call_s/p50": pytest.approx(0.4),
        "reward/call_s/p99": pytest.approx(0.8),
        "reward/extra/acc/mean": 0.5,
        "reward/extra/acc/missing_fraction": pytest.approx(1 / 3),
        "reward/extra/length/mean": 10.0,
        "reward/extra/length/missing_fraction": pytest.approx(2 / 3),
    }


def test_extra_keys_may_be_ragged_and_text_is_skipped():
    outcomes = [
        Score(0, {"a": 1}),
        Score(0, {"b": 4, "note": "x"}),
        Score(0, {"a": 2, "b": None, "list": [1]}),
        Abstention(),
    ]
    assert extra_metrics(outcomes) == {
        "reward/extra/a/mean": 1.5,
        "reward/extra/a/missing_fraction": pytest.approx(1 / 3),
        "reward/extra/b/mean": 4.0,
        "reward/extra/b/missing_fraction": pytest.approx(2 / 3),
    }


def test_the_error_rate_stops_the_run_and_shows_the_samples():
    report = summarize(REQUESTS, OUTCOMES, [0.1] * 8)
    check_error_rate(report, 0.5)
    with pytest.raises(RewardFailure) as stopped:
        check_error_rate(report, 0.49)
    message = str(stopped.value)
    assert message.startswith("4 of 8 rewards failed (50.0%; the limit is 49.0%). The first 3:\nrow 3 (test): first")
    assert "'reply 4'" in message
    assert "  KeyError: 3" in message
    assert "fourth" not in message


def test_no_error_passes_at_rate_zero():
    check_error_rate(summarize(REQUESTS[:3], OUTCOMES[:3], [0.1] * 3), 0.0)


def test_a_long_response_is_shown_by_its_end():
    request = RewardRequest("test", "a" * 1000 + "the end", "1")
    (sample,) = summarize([request], [RewardError("bad")], [0.1]).error_samples
    assert len(str(sample)) < 600
    assert "the end" in str(sample)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 100))
def test_percentile_is_a_value_with_enough_values_below(values, percent):
    result = percentile(values, percent)
    assert result in values
    assert sum(value <= result for value in values) >= percent / 100 * len(values) - 1e-9
