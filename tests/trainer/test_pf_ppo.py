"""PF-PPO in the trainer: which rows the update learns from."""

from pathlib import Path

import pytest
import torch

from tests.trainer.test_rollout_correction import recorded
from tests.trainer.tiny_run import GAE, base_overrides, measured, train
from tether.metrics.keys import describe
from tether.trainer.parts.pf_ppo import PolicyFiltration


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
def test_a_run(method: str, inputs: Path, tmp_path: Path) -> None:
    base = [*base_overrides(inputs, tmp_path / "run"), *GAE, "trainer.total_training_steps=2"]
    settings = [
        "algorithm.use_pf_ppo=True",
        "actor_rollout_ref.rollout.top_k=20",
        f"algorithm.pf_ppo.reweight_method={method}",
    ]
    metrics = measured(train([*base, *settings]))
    assert 0 < metrics[1]["pf_ppo/distinct_fraction"] <= 1
    assert metrics[1]["pf_ppo/score_mean"] >= metrics[1]["critic/score/min"]
    assert not [key for step in metrics.values() for key in step if describe(key) is None]
