"""Which existing name was meant."""

from pathlib import Path

from tether.spelling import closest, did_you_mean

PACKAGE = Path(__file__).parent.parent / "src/tether"


def test_the_nearest_comes_first_whatever_its_case():
    assert closest("cartpole-v2", ["Pendulum-v1", "CartPole-v1", "CartPole-v0"], count=3) == [
        "CartPole-v1",
        "CartPole-v0",
    ]
    assert closest("lamda", ["lam", "lambda"]) == ["lambda"]
    assert closest("nothing", ["else", "here"]) == []


def test_it_is_asked_behind_a_message_or_not_at_all():
    assert "no such thing." + did_you_mean("gea", ["gae", "grpo"]) == "no such thing. Did you mean gae?"
    assert did_you_mean("gae", ["gea", "aga"], count=2) == " Did you mean gea or aga?"
    assert did_you_mean("zzz", ["gae"]) == ""


def test_there_is_one_way_to_ask():
    assert {path.name for path in PACKAGE.rglob("*.py") if "get_close_matches" in path.read_text()} == {"spelling.py"}
