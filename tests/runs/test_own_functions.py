"""``FILE.py:NAME`` where an estimator or a policy loss is named: it trains; what cannot work is refused at start."""

import re
from pathlib import Path

import pytest
import torch

from tests.runs.steps import first_step
from tests.runs.tiny_run import LIGHT, base_overrides
from tether.config import ConfigError, load_config
from tether.control.learning.losses import policy_gradient
from tether.loop.own_functions import advantage_estimator, policy_loss
from tether.text.build import build_run
from tether.text.input_checks import missing_inputs

MINE = '''
"""The score and 1 more as advantage, and a loss that is the plain policy gradient."""

import torch

from tether.algorithms import Advantages, TokenLoss, Mean


def score(token_level_rewards, response_mask, *, gamma, uid=None):
    assert len(uid if uid is not None else response_mask) == len(response_mask)
    rows = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
    return Advantages(gamma * (rows + 1) * response_mask, rows * response_mask)


def plain(log_probs, old_log_probs, advantages, response_mask, *, clip_ratio_low=0.2):
    loss = torch.where(response_mask.bool(), -advantages * log_probs, 0.0)
    return TokenLoss(loss, {"actor/clip_low": Mean.of(torch.full_like(loss, clip_ratio_low), response_mask)})


def with_critic(token_level_rewards, response_mask, *, values):
    return Advantages(token_level_rewards - values, token_level_rewards)


def raises(token_level_rewards, response_mask):
    raise KeyError("reward")


def other_arguments(rewards, mask):
    return rewards


def unknown_keyword(token_level_rewards, response_mask, *, temperature):
    return token_level_rewards


def a_tuple(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards


def by_row(token_level_rewards, response_mask):
    rows = token_level_rewards.sum(-1, keepdim=True)
    return Advantages(rows, rows)


def not_finite(token_level_rewards, response_mask):
    return Advantages(token_level_rewards / 0, token_level_rewards)


def no_gradient(log_probs, old_log_probs, advantages, response_mask):
    return TokenLoss(-advantages * log_probs.detach(), {})


def a_tensor(log_probs, old_log_probs, advantages, response_mask):
    return -(advantages * log_probs).mean()


def needs_selected(log_probs, old_log_probs, advantages, response_mask, *, selected):
    return TokenLoss(-advantages * log_probs, {})


NUMBER = 3
'''
MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_run_with_both(inputs: Path, tmp_path: Path, file: Path) -> None:
    overrides = [
        *base_overrides(inputs, tmp_path / "out"),
        *LIGHT,
        f"algorithm.adv_estimator={file}:score",
        "algorithm.gamma=0.5",
        f"{MODE}={file}:plain",
        "actor_rollout_ref.actor.clip_ratio_low=0.125",
    ]
    step = first_step(overrides)
    assert step["actor/clip_low"] == 0.125
    assert step["critic/advantages/mean"] == pytest.approx(0.5 * step["critic/returns/mean"] + 0.5)
    assert step["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "a call on 4 rows of 3 tokens raised KeyError: 'reward'"),
        ("other_arguments", r"takes \(rewards, mask\); expected \(token_level_rewards, response_mask, \*, KEYWORDS\)"),
        ("unknown_keyword", "temperature is none of them"),
        ("a_tuple", "returns tuple; expected tether.algorithms.Advantages"),
        ("by_row", r"advantages is a tensor \[4, 1\] of torch.float32; expected .* \[4, 3\]"),
        ("not_finite", "advantages has a number that is not finite"),
        ("scor", r"has no function scor. Did you mean score\?"),
        ("NUMBER", "has no function NUMBER"),
    ],
)
def test_an_estimator_that_does_not_work_is_refused(file: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm.adv_estimator={file}:{name}: .*{message}"):
        advantage_estimator(f"{file}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_gradient", "the loss has no gradient by log_probs"),
        ("a_tensor", "returns Tensor; expected tether.algorithms.TokenLoss"),
        ("needs_selected", "selected is none of them"),
        ("score", r"takes \(token_level_rewards, response_mask, .*expected \(log_probs, old_log_probs, advantages"),
    ],
)
def test_a_loss_that_does_not_work_is_refused(file: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{MODE}={file}:{name}: .*{message}"):
        policy_loss(f"{file}:{name}")


def test_it_is_refused_before_anything_is_loaded(inputs: Path, tmp_path: Path, file: Path) -> None:
    overrides = [*base_overrides(inputs, tmp_path / "out"), f"algorithm.adv_estimator={file}:with_critic"]
    with pytest.raises(ValueError, match=r"with_critic needs values, and there is no critic: set critic.enable=True"):
        build_run(load_config(None, overrides))


def test_a_name_that_is_neither_is_refused_by_the_configuration(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'grpoo' is not one of .* or a function of a file: FILE.py:NAME"):
        load_config(None, [*base_overrides(inputs, tmp_path / "out"), "algorithm.adv_estimator=grpoo"])


def test_config_check_looks_for_the_function(inputs: Path, tmp_path: Path, file: Path) -> None:
    overrides = [*base_overrides(inputs, tmp_path / "out"), f"{MODE}={file}:plan"]
    problems = missing_inputs(load_config(None, overrides).config)
    assert [(problem.path, "Did you mean plain?" in problem.what) for problem in problems] == [(MODE, True)]


REWARDS = {
    "def score(solution_str, ground_truth): ...": r"score\(solution_str, ground_truth\), which is called by",
    "def score(data_source, solution_str, ground_truth, extra_info, level): ...": "required argument: 'level'",
    "def score(data_source, solution_str, ground_truth, extra_info=None, *, level: Missing = missing()): ...": None,
    "def score(**everything): ...": None,
    "@wrapped\ndef score(answer): ...": None,
    "from other import score": None,
}
"""File -> the error that its signature is; the names in it exist nowhere, so that running it would fail."""


@pytest.mark.parametrize("source", REWARDS)
def test_config_check_reads_the_signature_of_a_reward_without_running_it(
    source: str, inputs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(source)
    named = [f"custom_reward_function.path={file}", "custom_reward_function.name=score"]
    problems = missing_inputs(load_config(None, [*base_overrides(inputs, tmp_path / "out"), *named]).config)
    if REWARDS[source] is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.path == "custom_reward_function.name"
        assert re.search(REWARDS[source], problem.what)


def test_a_control_policy_takes_the_loss_too(file: Path) -> None:
    log_probs, advantages = torch.tensor([[-1.0], [-2.0]]), torch.tensor([[3.0], [-4.0]])
    gradient = policy_gradient(f"{file}:plain", {"clip_ratio_low": 0.2}, {})
    found = gradient(log_probs, log_probs, advantages, torch.tensor([[True], [False]]), torch.Generator())
    assert found.by_log_probs.tolist() == [[-3], [0]]


def test_keys_of_the_choice_of_tokens_are_not_for_a_loss_of_ones_own(inputs: Path, tmp_path: Path, file: Path) -> None:
    overrides = [*base_overrides(inputs, tmp_path / "out"), f"{MODE}={file}:plain"]
    policy_loss_keys = "actor_rollout_ref.actor.policy_loss"
    given = [f"{policy_loss_keys}.clip_cov_ratio=0.1", f"{policy_loss_keys}.ppo_kl_coef=0.2"]
    notes = [note for note in map(str, load_config(None, [*overrides, *given]).notes) if "no effect" in note]
    assert any("clip_cov_ratio" in note for note in notes)
    assert not any("ppo_kl_coef" in note for note in notes)


def test_wrong_shapes_reach_no_function_of_ones_own(file: Path) -> None:
    with pytest.raises(TypeError, match="score: unknown keyword gama"):
        advantage_estimator(f"{file}:score")(torch.ones(2, 3), torch.ones(2, 3), gama=1.0)
