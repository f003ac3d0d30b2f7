import threading
import time

import pytest

from tether.text.rewards.rules import bounded
from tether.text.rewards.rules.math import boxed, dapo, equal, geo3k

SAME = [
    ("\\frac12", "0.5"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("1/2", "\\frac12"),
    ("0.333333", "\\frac13"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("2\\frac12", "2.5"),
    ("(1,2)", "(1, 2)"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("1,2", "2,1"),
    ("1\\pm\\sqrt2", "1+\\sqrt2,1-\\sqrt2"),
    ("x=3", "3"),
    ("3", "x=3"),
    ("x^2+2x+1", "(x+1)^2"),
    ("y=2x+1", "y=1+2x"),
    ("\\sqrt{8}", "2\\sqrt2"),
    ("\\pi/2", "\\frac{\\pi}{2}"),
    ("3+4i", "4i+3"),
    ("10\\%", "10"),
    ("\\$10", "10"),
    ("1000", "1,\\!000"),
    ("12", "12.0"),
    ("60", "60^\\circ"),
    ("5\\text{ cm}", "5"),
    ("Evelyn", "\\text{Evelyn}"),
    ("(A)", "\\text{(A)}"),
    ("(-\\infty,3]", "(-\\infty, 3]"),
    ("x \\leq 3", "x\\le3"),
    ("2^{10}", "1024"),
    ("\\log_2 8", "3"),
    ("\\binom{5}{2}", "10"),
    ("11_2", "11_2"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
]
DIFFERENT = [
    ("0.333", "\\frac13"),
    ("3.14", "\\pi"),
    ("(2,1)", "(1,2)"),
    ("[1,2)", "(1,2)"),
    ("12\\%", "10\\%"),
    ("x", "4"),
    ("4x", "4"),
    ("B", "A"),
    ("\\text{even}", "\\text{odd}"),
    ("\\begin{pmatrix}1\\\\3\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("", "3"),
    ("\\frac{", "3"),
    ("lorem ipsum", "3"),
    # several answers at once, one of them right
    ("3,4", "4"),
    ("3 or 4", "4"),
    ("3\\text{ or }4", "4"),
    ("\\{3,4\\}", "4"),
    ("4 is not 5", "4"),
    ("4=3", "4"),
]
ENDLESS = [
    "9^{9^{9^{9}}}",
    "10^{8}!",
    "\\binom{10^8}{5 \\cdot 10^7}",
    "\\sum_{k=1}^{10^9} k^{-k}",
    "(" * 3000 + ")" * 3000,
]


def test_same_value():
    assert [pair for pair in SAME if not equal(*pair)] == []


def test_different_value():
    assert [pair for pair in DIFFERENT if equal(*pair)] == []


def test_an_answer_that_takes_for_ever_is_a_wrong_one(monkeypatch):
    """It would be an error of its row otherwise, which is left out of the update."""
    assert equal("\\frac{84}{2}", "42")  # imports what the first comparison needs
    monkeypatch.setattr(bounded, "MAX_SECONDS", 0.2)
    assert equal("\\frac{84}{2}", "42")
    assert [answer for answer in ENDLESS if equal(answer, "42")] == []


def test_a_response_of_many_tags_is_read_at_once():
    """Of a regular expression that goes back to each of them, this would take minutes."""
    many = "<think>" + "</think>\\boxed{" * 20_000
    begun = time.process_time()
    assert geo3k("hiyouga/geometry3k", many, "4", {})["score"] == 0.0
    assert geo3k("hiyouga/geometry3k", many + "4}", "4", {})["score"] == 1.0
    assert time.process_time() - begun < 5


def test_geo3k():
    scores = {
        "<think>a</think>\\boxed{4}": 1.0,
        "<think>a</think>b\n\\boxed{4} c": 1.0,
        "<think>a</think>\\boxed{5}": 0.1,
        "<think>\\boxed{4}</think>": 0.9,
        " <think>a</think>\\boxed{4}": 0.9,
        "a</think>\\boxed{4}": 0.9,
        "<think>a</think>\\boxed{4": 0.0,
    }
    assert {reply: geo3k("hiyouga/geometry3k", reply, "4", {})["score"] for reply in scores} == pytest.approx(scores)


def test_only_the_last_box_counts():
    scores = {
        "so \\boxed{4}.": 1.0,
        "\\boxed{3}, no, \\boxed{4}": 1.0,
        "\\boxed{4}, no, \\boxed{3}": 0.0,
        "4": 0.0,
        "the answer is $4$": 0.0,
        "\\boxed{}": 0.0,
        "\\boxed{4": 0.0,
        "": 0.0,
    }
    assert {reply: boxed("lighteval/MATH", reply, "4", {}) for reply in scores} == scores


def test_dapo():
    results = {
        "Answer: 4": (1.0, "4"),
        "Answer: $4$.": (1.0, "4"),
        "answer: \\boxed{4}": (1.0, "\\boxed{4}"),
        "\\boxed{4}": (1.0, "4"),
        "Answer: 4\nAnswer: 5": (-1.0, "5"),
        "Answer: 4" + " and so on" * 30: (-1.0, None),
        "4": (-1.0, None),
    }
    expected = {reply: {"score": score, "acc": score > 0, "pred": pred} for reply, (score, pred) in results.items()}
    assert {reply: dapo("math_dapo", reply, "4", {}) for reply in results} == expected


def test_it_works_outside_the_main_thread():
    result = []
    thread = threading.Thread(target=lambda: result.append(boxed("lighteval/MATH", "\\boxed{\\frac{2}{4}}", "0.5", {})))
    thread.start()
    thread.join()
    assert result == [1.0]


def test_the_right_answer_may_be_boxed():
    assert boxed("lighteval/MATH", "\\boxed{4}", "\\boxed{4}", {}) == 1.0
    assert dapo("math", "Answer: 4", "\\boxed{4}", {})["score"] == 1.0
    assert dapo("math", "Answer: 5", "\\boxed{4}", {})["score"] == -1.0


def test_an_empty_ground_truth_has_no_verdict():
    for rule in (boxed, dapo):
        with pytest.raises(ValueError, match="ground_truth is ''"):
            rule("lighteval/MATH", "\\boxed{}", "", {})


def test_every_ground_truth_equals_itself(test_data):
    truths = truths_of(test_data)
    assert len(truths) == 5000
    assert all(boxed("lighteval/MATH", f"so \\boxed{{{truth}}}.", truth, {}) == 1.0 for truth in truths)


SPELLINGS = ("\\displaystyle %s", "$%s$", "%s\\!", "%s.")


def test_ground_truths_written_another_way_are_recognised(test_data):
    """Other spellings of an answer take the way through math-verify."""
    spelled = [(way % truth, truth) for truth in truths_of(test_data)[::500] for way in SPELLINGS]
    assert [pair for pair in spelled if boxed("lighteval/MATH", f"\\boxed{{{pair[0]}}}", pair[1], {}) != 1.0] == []


def test_other_values_are_not(test_data):
    truths = truths_of(test_data)[::200]
    assert [truth for truth in truths if boxed("lighteval/MATH", f"\\boxed{{{truth} + 1}}", truth, {}) != 0.0] == []


def truths_of(test_data):
    import pyarrow.parquet as pq

    rows = pq.read_table(test_data / "math" / "test.parquet", columns=["reward_model"]).to_pylist()
    return [row["reward_model"]["ground_truth"] for row in rows]
