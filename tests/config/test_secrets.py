"""Secrets among the arguments of a reward: used, and shown nowhere."""

import pytest

from tests.config.loading import load, problems_of
from tether.config import format_tree
from tether.config.secrets import has_secrets, is_secret, masked, masked_command

KWARGS = "custom_reward_function.reward_kwargs"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "OPENAI_API_KEY",
        "hf_token",
        "token",
        "access-token",
        "clientSecret",
        "db_password",
        "Authorization",
    ],
)
def test_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["key", "answer_key", "max_tokens", "eos_token", "token_len", "passwords_file", "secretary", ""]
)
def test_names_that_hide_nothing(name: str) -> None:
    assert not is_secret(name)


def test_a_tree_is_masked_and_otherwise_the_same() -> None:
    tree = {"a": {"api_key": "sk-1", "n": 3, "list": [{"token": "t"}]}, "token": 5, "password": ""}
    assert masked(tree) == {"a": {"api_key": "***", "n": 3, "list": [{"token": "***"}]}, "token": 5, "password": ""}
    assert has_secrets(tree)
    assert not has_secrets(masked({"token": 5, "a": [1, "x"]}))


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (f"{KWARGS}.api_key=sk-123", f"{KWARGS}.api_key=***"),
        (f"+{KWARGS}.api_key=sk-123", f"+{KWARGS}.api_key=***"),
        (f"{KWARGS}={{api_key: sk-123, n: 2}}", f"{KWARGS}={{api_key: ***, n: 2}}"),
        (f"{KWARGS}={{n: 2, 'hf_token': 'hf_123'}}", f"{KWARGS}={{n: 2, 'hf_token': ***}}"),
        ("algorithm.gamma=1", "algorithm.gamma=1"),
        ("train", "train"),
        (
            "actor_rollout_ref.model.override_config={eos_token: x}",
            "actor_rollout_ref.model.override_config={eos_token: x}",
        ),
    ],
)
def test_a_command_is_masked(argument: str, shown: str) -> None:
    assert masked_command([argument]) == [shown]


def test_a_configuration_is_shown_without_and_saved_with_its_secrets() -> None:
    loaded = load(f"{KWARGS}.api_key=sk-123", "custom_reward_function.path=reward.py")
    assert "sk-123" not in format_tree(loaded)
    assert "api_key: '***'" in format_tree(loaded)
    assert "sk-123" not in str(loaded.shown())
    assert "sk-123" in loaded.to_yaml()
    assert loaded.has_secrets
    assert not load("custom_reward_function.path=reward.py").has_secrets


@pytest.mark.parametrize(
    "override",
    [
        "reward_model.reward_kwargs.api_key=sk-123",  # refused
        "custom_reward_function.reward_kwargs=[{api_key: sk-123}]",  # not a mapping
        "custom_reward_function={api_key: sk-123}",  # not a key
    ],
)
def test_problems_are_told_without_secrets(override: str) -> None:
    assert "sk-123" not in str(problems_of(override))
