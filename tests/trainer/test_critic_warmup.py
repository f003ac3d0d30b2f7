"""The critic's own schedule: warm-up by steps and by explained variance, its own epochs and mini-batches."""

import math
from pathlib import Path

import pytest
import torch

from tests.trainer.tiny_run import GAE, base_overrides, measured, train, weights
from tether.trainer.parts.critic_warmup import CriticWarmup

BY_PROMPT = '''
"""Half of the prompts are worth 1, whatever is answered: easy to predict."""

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(int(ground_truth) >= 10)
'''


def test_steps_and_threshold() -> None:
    warmup = CriticWarmup(steps=3, explained_variance=0.3)
    assert [warmup.is_over(step, explained) for step, explained in enumerate([0.2, 0.5, 0.1, -1.0], start=1)] == [
        False, False, True, True,
    ]  # fmt: skip  # reached in step 2, which is still before step 3
    assert [CriticWarmup(explained_variance=0.3).is_over(1, 0.3), CriticWarmup().is_over(1, 0.0)] == [True, True]


def test_a_threshold_never_reached_is_said() -> None:
    warmup = CriticWarmup(explained_variance=0.9)
    warmup.is_over(1, 0.4)
    assert "critic_warmup_until_explained_variance=0.9" in (warmup.never_over() or "")
    warmup.is_over(2, 0.95)
    assert warmup.never_over() is None
    assert "before trainer.critic_warmup=3" in (CriticWarmup(steps=3, reached=True).never_over() or "")


@pytest.mark.parametrize(("steps", "frozen"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_warm_up_of_n_holds_the_policy_back_for_n_less_one_steps(steps: int, frozen: int) -> None:
    """verl updates the actor where ``critic_warmup <= global_steps``, which begin at 1."""
    warmup = CriticWarmup(steps)
    assert [warmup.is_over(step, -math.inf) for step in range(1, 8)] == [False] * frozen + [True] * (7 - frozen)


def test_state() -> None:
    warmup = CriticWarmup(explained_variance=0.3)
    warmup.is_over(1, 0.4)
    other = CriticWarmup(explained_variance=0.3)
    other.load_state_dict(warmup.state_dict())
    assert other.is_over(2, 0.0)


def test_the_policy_waits_for_the_critic(inputs: Path, tmp_path: Path) -> None:
    threshold = 0.2
    reward = tmp_path / "by_prompt.py"
    reward.write_text(BY_PROMPT)
    base = [*base_overrides(inputs, tmp_path / "run"), *GAE, "trainer.total_training_steps=6"]
    settings = [
        f"custom_reward_function.path={reward}",
        f"trainer.critic_warmup_until_explained_variance={threshold}",
        "critic.optim.lr=3e-3",
        "critic.optim.lr_warmup_steps=-1",
        "critic.ppo_epochs=4",
    ]
    metrics = measured(train([*base, *settings]))
    waiting = [step for step in metrics if "actor/pg_loss" not in metrics[step]]
    assert waiting == list(range(1, len(waiting) + 1))
    assert 1 < len(waiting) < 6
    assert all(metrics[step]["critic/vf_explained_var"] < threshold for step in waiting)
    assert metrics[len(waiting) + 1]["critic/vf_explained_var"] >= threshold


def test_the_critic_has_its_own_rate_epochs_and_mini_batches(inputs: Path, tmp_path: Path) -> None:
    """4 prompts of 2 responses: the actor takes 2 optimizer steps a training step, the critic 4 x 3."""
    base = [*base_overrides(inputs, tmp_path / "run"), *GAE, "trainer.total_training_steps=1", "trainer.save_freq=1"]
    settings = ["critic.ppo_epochs=3", "critic.ppo_mini_batch_size=1", "critic.optim.lr_warmup_steps=0"]
    folder = train([*base, *settings]) / "global_step_1"
    assert measured(folder.parent)[1]["critic/lr"] == 1e-2

    def steps(role: str) -> set[int]:
        optimizer = torch.load(folder / "training" / f"{role}.pt", weights_only=True)
        return {int(state["step"]) for state in optimizer["state"].values()}

    assert steps("actor") == {2}
    assert steps("critic") == {12}
    assert weights(folder, "critic")
