import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.text.rewards.rules.extract import answer_tag, first_word, last_boxed, last_number


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", None),
        ("... !", None),
        ("Kaylum can't bear it.", "Kaylum"),
        (" **Steven-lee**, of course", "Steven-lee"),
        ("\n1. O'Neil", "1"),
        ("O\u2019Neil", "O\u2019Neil"),
        ("\u00c9lo\u00efse!", "\u00c9lo\u00efse"),
        ("-Ann", "Ann"),
    ],
)
def test_first_word(text, word):
    assert first_word(text) == word


LAST_NUMBERS = [
    ("", None),
    ("none at all", None),
    ("5", "5"),
    ("-5", "-5"),
    ("+5", "5"),
    ("4 - 9 = -5", "-5"),
    ("9-4", "4"),
    ("3.25", "3.25"),
    ("it is 3.", "3"),
    ("1,234,567", "1234567"),
    ("1, 2, 3", "3"),
    ("1,2,3", "3"),
    ("12,34", "34"),
    ("1,2345", "2345"),
    ("$5", "5"),
    ("-$5.00", "-5.00"),
    ("007", "007"),
    ("5%", "5"),
    ("<think>8</think> 9", "9"),
]


def test_last_number():
    for text, number in LAST_NUMBERS:
        assert last_number(text) == number


@given(st.text(alphabet="abc .,=", max_size=20), st.integers())
def test_last_number_finds_any_integer_behind_words(words, number):
    assert last_number(f"{words} {number} {words}".replace(",", "")) == str(number)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer> a\nb </answer> <answer>\n6\n</answer>!", "6"),
        ("<answer>5", None),
        ("5", None),
    ],
)
def test_answer_tag(text, answer):
    assert answer_tag(text) == answer


LAST_BOXED = [
    ("\\boxed{5}", "5"),
    ("\\boxed{4} or \\boxed{5}.", "5"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed {5}", "5"),
    ("\\fbox{5}", "5"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{}", ""),
    ("\\boxed{5", None),
    ("\\boxed{5} \\boxed{6", None),
    ("boxed{5}", None),
]


def test_last_boxed():
    for text, answer in LAST_BOXED:
        assert last_boxed(text) == answer
