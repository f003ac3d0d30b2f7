import json

import pyarrow.parquet as pq
import pytest

from tether.text.rewards.rules.gsm8k import strict

STRICT = [
    ("4 + 3 = 7\n#### 7", 1.0),
    ("#### 7", 1.0),
    ("#### 7 apples", 1.0),
    ("#### 6\nno, wait\n#### 7", 1.0),
    ("#### 7\nno, wait\n#### 6", 0.0),
    ("#### 7\n#### none", 1.0),
    ("#### $7", 1.0),
    ("#### -7", 0.0),
    ("#### 07", 0.0),
    ("#### 7.0", 0.0),
    ("#### 7.", 0.0),
    ("#### 77", 0.0),
    ("####7", 0.0),
    ("####  7", 0.0),
    ("### 7", 0.0),
    ("the answer is 7", 0.0),
    ("\\boxed{7}", 0.0),
    ("", 0.0),
    ("#### 7" + "." * 294, 0.0),  # in the window, but the full stops belong to the number's characters
    ("#### 7" + "!" * 294, 1.0),
    ("#### 7" + "!" * 295, 0.0),  # the mark begins one character before the final 300
]


def test_strict():
    for reply, expected in STRICT:
        assert strict("openai/gsm8k", reply, "7", {}) == expected


@pytest.mark.parametrize(
    ("reply", "truth", "expected"),
    [
        ("#### 1,234", "1234", 1.0),
        ("#### $1,234", "1234", 1.0),
        ("#### -12", "-12", 1.0),
        ("#### -$12", "-12", 1.0),
        ("#### 0.5", "0.5", 1.0),
        ("#### .5", "0.5", 0.0),
        ("#### 5", 5, 1.0),
    ],
)
def test_strict_takes_out_commas_and_dollars(reply, truth, expected):
    assert strict("openai/gsm8k", reply, truth, {}) == expected


@pytest.mark.parametrize("truth", [None, "", " "])
def test_without_a_ground_truth_there_is_no_verdict(truth):
    with pytest.raises(ValueError, match=r"reward_model\.ground_truth"):
        strict("openai/gsm8k", "#### 7", truth, {})


def test_every_official_solution_is_right(test_data):
    rows = pq.read_table(test_data / "gsm8k" / "test.parquet").to_pylist()
    assert len(rows) == 1319
    for row in rows:
        truth, solution = row["reward_model"]["ground_truth"], row["extra_info"]["answer"]
        assert strict(row["data_source"], solution, truth, row["extra_info"]) == 1.0, json.dumps(row)
        assert strict(row["data_source"], solution + "1", truth, row["extra_info"]) == 0.0
