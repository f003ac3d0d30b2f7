import pytest

from tether.rewards import router
from tether.rewards.router import REWARDS, check_sources, find_reward
from tether.rewards.rules import gsm8k, math, reasoning_gym


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("openai/gsm8k", gsm8k.strict),
        ("DigitalLearningGmbH/MATH-lighteval", math.boxed),
        ("lighteval/MATH", math.boxed),
        ("HuggingFaceH4/MATH-500", math.boxed),
        ("math_dapo", math.dapo),
        ("aime2024", math.dapo),
        ("aime_2025", math.dapo),
        ("reasoning_gym/chain_sum", reasoning_gym.score),
    ],
)
def test_sources_find_their_rule(source, rule):
    assert find_reward(source) is rule


def test_all_rules_exist():
    assert all(callable(find_reward(source)) for source in REWARDS)
    check_sources(REWARDS)


def test_unknown_sources_are_refused_all_at_once():
    with pytest.raises(ValueError) as refused:
        check_sources({"openai/gsm8k", "openai/gsm8", "my/task"})
    message = str(refused.value)
    assert "'my/task', 'openai/gsm8'" in message
    assert "Did you mean openai/gsm8k?" in message
    assert "reasoning_gym/*" in message
    assert "custom_reward_function.path" in message
    with pytest.raises(ValueError, match="'my/task'"):
        find_reward("my/task")


def test_a_missing_optional_package_is_named(monkeypatch):
    monkeypatch.setattr(router.importlib.util, "find_spec", lambda _: None)
    check_sources(["openai/gsm8k"])
    with pytest.raises(ValueError, match=r"pip install 'tether\[quickstart\]'"):
        check_sources(["reasoning_gym/chain_sum"])
