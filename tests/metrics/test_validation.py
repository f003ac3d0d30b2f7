"""Validation metrics against numbers worked by hand and against a bootstrap written out as a loop."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.metrics.keys import describe
from tether.metrics.validation import (
    ValidationRow,
    bootstrap,
    majority_value,
    prompt_metrics,
    validation_metrics,
)


def rows(uid: int, rewards: list[object], source: str = "gsm8k", preds: list[str] | None = None) -> list[ValidationRow]:
    votes = preds or [None] * len(rewards)
    return [ValidationRow(source, uid, {"reward": r}, pred) for r, pred in zip(rewards, votes, strict=True)]


def test_one_sample_a_prompt_is_a_plain_mean() -> None:
    metrics = validation_metrics(rows(0, [1.0]) + rows(1, [0.0]) + rows(2, [0.5]))
    assert metrics == {"val-core/gsm8k/reward/mean@1": 0.5, "val-aux/gsm8k/num_unscored": 0.0}


def test_repeated_questions_count_once_and_stand_beside_the_most_frequent_answer() -> None:
    asked = [("a", 1.0, "4"), ("a", 1.0, "4"), ("a", 1.0, "4"), ("b", 0.0, "5"), ("c", 0.0, "5")]
    metrics = validation_metrics(
        ValidationRow("sums", uid, {"reward": reward}, question=question, truth=truth)
        for uid, (question, reward, truth) in enumerate(asked)
    )
    assert metrics["val-core/sums/reward/mean@1"] == pytest.approx(3 / 5)
    assert metrics["val-aux/sums/num_distinct"] == 3
    assert metrics["val-aux/sums/distinct_mean"] == pytest.approx(1 / 3)
    assert metrics["val-aux/sums/majority_answer"] == pytest.approx(2 / 3)
    assert all(describe(key) for key in metrics)


@pytest.mark.parametrize(("values", "compared"), [
    ({"reward": 1.2}, False), ({"reward": 0.5}, False), ({"reward": 1.0}, True), ({"reward": -1.0, "acc": False}, True),
])  # fmt: skip
def test_a_score_that_is_not_right_or_wrong_has_no_most_frequent_answer(
    values: dict[str, object], compared: bool
) -> None:
    """As a weighted sum of several rewards, or parts of the points."""
    metrics = validation_metrics([ValidationRow("sums", 0, values, question="a", truth="4")])
    assert ("val-aux/sums/majority_answer" in metrics) == compared


def test_several_samples_core_and_aux() -> None:
    metrics = validation_metrics(rows(0, [1.0, 0.0, 0.0, 0.0]) + rows(1, [1.0, 1.0, 1.0, 1.0]))
    assert metrics["val-core/gsm8k/reward/mean@4"] == 0.625
    assert metrics["val-aux/gsm8k/reward/std@4"] == pytest.approx(math.sqrt(3) / 8)  # prompts: sqrt(3)/4 and 0
    assert {key for key in metrics if "/best@" in key or "/worst@" in key} == {
        "val-core/gsm8k/reward/best@4/mean",
        "val-core/gsm8k/reward/best@4/std",
        "val-aux/gsm8k/reward/best@2/mean",
        "val-aux/gsm8k/reward/best@2/std",
        *(f"val-aux/gsm8k/reward/worst@{n}/{moment}" for n in (2, 4) for moment in ("mean", "std")),
    }
    # one of four is right: a draw of 2 with replacement has it with 1 - (3/4)^2, a draw of 4 with 1 - (3/4)^4
    assert metrics["val-aux/gsm8k/reward/best@2/mean"] == pytest.approx((1 - (3 / 4) ** 2 + 1) / 2, abs=0.03)
    assert metrics["val-core/gsm8k/reward/best@4/mean"] == pytest.approx((1 - (3 / 4) ** 4 + 1) / 2, abs=0.03)
    assert all(describe(key) for key in metrics)


def test_acc_is_core_where_it_is_given_and_sources_are_apart() -> None:
    data = [
        ValidationRow("math", 0, {"reward": 0.3, "acc": True, "comment": "text", "only_here": 2}),
        ValidationRow("math", 1, {"reward": 0.5, "acc": False}),
        *rows(0, [1.0], "gsm8k"),
    ]
    metrics = validation_metrics(data)
    assert metrics["val-core/math/acc/mean@1"] == 0.5
    assert metrics["val-aux/math/reward/mean@1"] == 0.4
    assert metrics["val-aux/math/only_here/mean@1"] == 2
    assert metrics["val-core/gsm8k/reward/mean@1"] == 1.0
    assert not [key for key in metrics if "comment" in key]


def test_acc_of_some_rows_is_no_headline() -> None:
    """A reward that returns 0 early, without `acc`, would be judged by its well-formed answers alone."""
    wrong_format = [ValidationRow("math", i, {"reward": 0.0}) for i in range(7)]
    metrics = validation_metrics([*wrong_format, ValidationRow("math", 7, {"reward": 1.0, "acc": True})])
    assert metrics["val-core/math/reward/mean@1"] == 1 / 8
    assert metrics["val-aux/math/acc/missing_fraction"] == 7 / 8
    assert not [key for key in metrics if key.startswith("val-core/") and "acc" in key]
    unscored = ValidationRow("math", 8, {"reward": None})
    assert "val-core/math/acc/mean@1" in validation_metrics(
        [unscored, ValidationRow("math", 7, {"reward": 1.0, "acc": True})]
    )


def test_a_response_without_a_score_is_counted_and_not_scored_zero() -> None:
    metrics = validation_metrics(rows(0, [1.0, None]) + rows(1, [float("nan"), None]) + rows(2, [0.5, 0.0]))
    assert metrics["val-core/gsm8k/reward/mean@2"] == (1.0 + 0.25) / 2
    assert metrics["val-aux/gsm8k/num_unscored"] == 3


def test_majority() -> None:
    assert majority_value([0.0, 1.0, 1.0], ["7", "8", "8"]) == 1.0
    assert majority_value([0.3, 1.0], ["7", "8"]) == 0.3  # a tie: the first vote
    metrics = prompt_metrics(rows(0, [1.0, 1.0, 1.0, 0.0], preds=["8", "8", "8", "7"]), "reward")
    # a draw of 4 elects "8" unless "7" has 3 or more of 4, or 2 of 4 and the first vote
    p = 1 / 4
    wrong = p**4 + 4 * p**3 * (1 - p) + 3 * p**2 * (1 - p) ** 2
    assert metrics["maj@4/mean"] == pytest.approx(1 - wrong, abs=0.03)
    assert not [key for key in prompt_metrics(rows(0, [1.0, 0.0]), "reward") if key.startswith("maj")]


def test_bootstrap_draws_are_those_of_the_legacy_generator() -> None:
    values = np.array([0.0, 0.3, 0.7, 1.0, 0.2])
    np.random.seed(42)  # as verl does, draw by draw
    expected = [np.max(values[np.random.choice(5, size=3, replace=True)]) for _ in range(1000)]
    assert bootstrap(values, 3, lambda draws: draws.max(axis=1)).tolist() == expected
    with pytest.raises(ValueError, match="no values"):
        bootstrap(np.array([]), 3, lambda draws: draws.max(axis=1))


def test_subset_sizes_double_up_to_all_samples() -> None:
    def sizes(total: int) -> set[str]:
        return {key.split("/")[0] for key in prompt_metrics(rows(0, [1.0] * total), "reward") if key[:4] == "best"}

    assert sizes(1) == set()
    assert sizes(2) == {"best@2"}
    assert sizes(6) == {"best@2", "best@4", "best@6"}
    assert sizes(8) == {"best@2", "best@4", "best@8"}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_bounds(rewards: list[float]) -> None:
    metrics = prompt_metrics(rows(0, list(rewards)), "reward")
    total = len(rewards)
    best, worst = metrics[f"best@{total}/mean"], metrics[f"worst@{total}/mean"]
    assert min(rewards) - 1e-9 <= worst <= best <= max(rewards) + 1e-9
    assert metrics["best@2/mean"] <= best + 0.5
    assert metrics[f"mean@{total}"] == pytest.approx(sum(rewards) / total, abs=1e-9)


def test_each_row_counts_once_whatever_the_order() -> None:
    data = rows(0, [1.0, 0.0]) + rows(1, [0.0, 0.0]) + rows(2, [1.0, 1.0])
    interleaved = data[::2] + data[1::2]
    key = "val-core/gsm8k/reward/mean@2"
    assert validation_metrics(interleaved)[key] == validation_metrics(data)[key] == 0.5
