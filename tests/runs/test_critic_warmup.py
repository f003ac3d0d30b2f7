"""The critic's own schedule: warm-up by steps and by explained variance, its own epochs and mini-batches."""

import math

import pytest

from tests.runs.steps import stepped
from tests.runs.tiny_run import GAE, LIGHT
from tether.loop.parts import CriticWarmup
from tether.runtime.objects import register_objects


def by_prompt(data_source, solution_str, ground_truth, extra_info=None):
    """Half of the prompts are worth 1, whatever is answered: easy to predict."""
    return float(int(ground_truth) >= 10)


def test_steps_and_threshold() -> None:
    warmup = CriticWarmup(steps=3, explained_variance=0.3)
    assert [warmup.observe(step, explained) for step, explained in enumerate([0.2, 0.5, 0.1, -1.0], start=1)] == [
        False, False, True, True,
    ]  # fmt: skip  # reached in step 2, which is still before step 3
    assert [CriticWarmup(explained_variance=0.3).observe(1, 0.3), CriticWarmup().observe(1, 0.0)] == [True, True]


def test_a_threshold_never_reached_is_said() -> None:
    warmup = CriticWarmup(explained_variance=0.9)
    warmup.observe(1, 0.4)
    assert "critic_warmup_until_explained_variance=0.9" in (warmup.unfinished_problem() or "")
    warmup.observe(2, 0.95)
    assert warmup.unfinished_problem() is None
    assert "before trainer.critic_warmup=3" in (CriticWarmup(steps=3, reached=True).unfinished_problem() or "")


@pytest.mark.parametrize(("steps", "frozen"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_warm_up_of_n_holds_the_policy_back_for_n_less_one_steps(steps: int, frozen: int) -> None:
    """verl updates the actor where ``critic_warmup <= global_steps``, which begin at 1."""
    warmup = CriticWarmup(steps)
    assert [warmup.observe(step, -math.inf) for step in range(1, 8)] == [False] * frozen + [True] * (7 - frozen)


def test_state() -> None:
    warmup = CriticWarmup(explained_variance=0.3)
    warmup.observe(1, 0.4)
    other = CriticWarmup(explained_variance=0.3)
    other.load_state_dict(warmup.state_dict())
    assert other.observe(2, 0.0)


def test_the_policy_waits_for_the_critic(base: list[str]) -> None:
    threshold = 0.2
    settings = [
        f"trainer.critic_warmup_until_explained_variance={threshold}",
        "critic.optim.lr=3e-3",
        "critic.optim.lr_warmup_steps=-1",
        "critic.ppo_epochs=4",
        "trainer.total_training_steps=6",
    ]
    with register_objects({"letters": by_prompt}):
        metrics = stepped([*base, *GAE, *LIGHT, *settings], 6).metrics
    waiting = ["actor/pg_loss" not in found for found in metrics]
    first = waiting.index(False)
    assert waiting == [True] * first + [False] * (6 - first)
    assert 1 < first < 6
    assert all(found["critic/vf_explained_var"] < threshold for found in metrics[:first])
    assert metrics[first]["critic/vf_explained_var"] >= threshold


def test_the_critic_has_its_own_rate_epochs_and_mini_batches(base: list[str]) -> None:
    """4 prompts of 2 responses: the actor takes 2 optimizer steps a training step, the critic 4 x 3."""
    settings = ["critic.ppo_epochs=3", "critic.ppo_mini_batch_size=1", "critic.optim.lr_warmup_steps=0"]
    found = stepped([*base, *GAE, *LIGHT, *settings])
    assert found.metrics[0]["critic/lr"] == 1e-2
    for learner, steps in ((found.trainer.actor, 2), (found.trainer.critic, 12)):
        state = learner.engine.optimizer.state_dict()["state"]
        assert {int(of_weight["step"]) for of_weight in state.values()} == {steps}
