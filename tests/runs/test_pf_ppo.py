"""PF-PPO in the trainer: which rows the update learns from."""

import pytest
import torch

from tests.runs.steps import first_step
from tests.runs.test_rollout_correction import recorded
from tests.runs.tiny_run import GAE, LIGHT
from tether.metrics.keys import describe
from tether.text.learning.pf_ppo import PolicyFiltration


def test_rows_follow_their_reward() -> None:
    batch = recorded()
    batch.advantages = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    drawn, metrics = PolicyFiltration("pow", 200.0, seed=1).draw(batch, 1)
    assert drawn.advantages[:, 0].tolist() == [1, 1, 1]  # score 1 against 0.5^200, and a row without a score
    assert metrics == {"pf_ppo/distinct_fraction": 0.5, "pf_ppo/score_mean": 1.0}
    assert batch.advantages[:, 0].tolist() == [1, 4, 0]


def test_the_draw_depends_on_seed_and_step_alone() -> None:
    batch = recorded()[torch.tensor([0, 1] * 16)]
    batch.values = torch.arange(32.0)[:, None].expand(32, 3).clone()

    def rows(seed: int, step: int) -> list[float]:
        torch.manual_seed(step)  # the global generator has no part in it
        return PolicyFiltration("max_random", 2.0, seed).draw(batch, step)[0].values[:, 0].tolist()

    assert rows(1, 1) == rows(1, 1)
    assert rows(1, 1) != rows(1, 2)
    assert rows(1, 1) != rows(2, 1)


def test_a_batch_without_a_score_stays() -> None:
    batch = recorded()
    batch.response_mask = torch.zeros_like(batch.response_mask)
    assert PolicyFiltration("pow", 2.0, 1).draw(batch, 1) == (batch, {})


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_a_run(method: str, base: list[str]) -> None:
    settings = ["algorithm.use_pf_ppo=True", f"algorithm.pf_ppo.reweight_method={method}"]
    metrics = first_step([*base, *GAE, *LIGHT, *settings, "actor_rollout_ref.rollout.top_k=20"])
    assert 0 < metrics["pf_ppo/distinct_fraction"] <= 1
    assert metrics["pf_ppo/score_mean"] >= metrics["critic/score/min"]
    assert not [key for key in metrics if describe(key) is None]
