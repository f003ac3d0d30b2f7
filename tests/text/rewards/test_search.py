"""Search-R1's exact match, and the rules of NuminaMath and Geometry3K: what counts, and what never does."""

import pytest

from tether.text.rewards.rules.math import geo3k, numina
from tether.text.rewards.rules.search import exact_match

TRUTH = {"target": ["The Beatles", "Beatles, the band"]}


ANSWERS = [
    ("<answer>beatles</answer>", TRUTH, 1.0),
    ("<answer> A beatles  band! </answer>", TRUTH, 1.0),
    ("<answer>the Beatles song</answer>", TRUTH, 0.0),
    ("<answer>Beatles the, band</answer>", TRUTH, 1.0),
    ("<answer>Queen</answer> no, <answer>\nthe Beatles.\n</answer>", TRUTH, 1.0),
    ("<answer>Beatles</answer> no, <answer>Queen</answer>", TRUTH, 0.0),
    ("Beatles", TRUTH, 0.0),
    ("<answer>Beatles", TRUTH, 0.0),
    ("<answer>x</answer>" * 10 + "<answer>Beatles</answer>", TRUTH, 0.25),
    ("<answer>x</answer>" * 9 + "<answer>Beatles</answer>", TRUTH, 1.0),
    ("<answer>1969</answer>", "1969", 1.0),
    ("<answer>1969</answer>", '{"target": ["1969"]}', 1.0),
    ("<answer>[sic</answer>", "[sic", 1.0),
]


def test_an_answer_is_one_of_the_known_ones():
    for reply, truth, score in ANSWERS:
        assert exact_match("searchR1_nq", reply, truth, {}) == score


@pytest.mark.parametrize("truth", [None, "", [], {}, {"target": []}, {"target": [""]}])
def test_nothing_to_compare_with_is_an_error(truth):
    with pytest.raises(ValueError, match="needs an answer"):
        exact_match("searchR1_nq", "<answer></answer>", truth, {})


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (r"so it is \boxed{\frac12}", 1.0),
        ("The answer is $0.5$.", 1.0),
        ("Answer: 1/2", 1.0),
        (r"the answer is 3, or rather \boxed{0.5}", 1.0),
        (r"the answer is 0.5, or rather \boxed{3}", 0.0),
        ("x = 0.5", 0.0),  # verl takes it
        ("", 0.0),
    ],
)
def test_numina(reply, score):
    assert numina("numina_cn_k12", reply, r"\frac{1}{2}", {}) == score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (r"<think>a</think> \boxed{\sqrt{8}}", 1.0),
        (r"\boxed{2\sqrt2}", 0.9),
        (r"<think>a</think> \boxed{3}", 0.1),
        (r"\boxed{3} <think>a</think>", 0.0),
        ("2.83", 0.0),
    ],
)
def test_geo3k(reply, score):
    result = geo3k("hiyouga/geometry3k", reply, r"2\sqrt{2}", {})
    assert result == {"score": pytest.approx(score), "acc": score >= 0.9}
