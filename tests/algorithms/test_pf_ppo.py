import math

import pytest
import torch

from tether.algorithms import pf_ppo_indices

SCORES = torch.tensor([0.0, 1.0, -2.0, 1.0, math.nan])
VALID = torch.tensor([True, True, True, True, False])


def frequencies(method: str, **keywords: float) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    draws = [
        pf_ppo_indices(SCORES, VALID, reweight_method=method, generator=generator, **keywords) for _ in range(2000)
    ]
    return (torch.cat(draws).bincount(minlength=5) / 10000).tolist()


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("pow", [0, 1, 4, 1, 0]),  # |score|^2; the failed row is never drawn
        ("max_min", [0, 1, 1, 1, 0]),
        ("max_random", [0.1, 0.4, 0.1, 0.4, 0]),
    ],
)
def test_rows_are_drawn_by_weight(method: str, weights: list[float]) -> None:
    # 10000 draws: a standard error of at most .005
    assert frequencies(method) == pytest.approx([w / sum(weights) for w in weights], abs=0.02)


def test_the_exponent() -> None:
    assert frequencies("pow", weight_pow=1.0) == pytest.approx([0, 0.25, 0.5, 0.25, 0], abs=0.02)


def test_the_seed_decides() -> None:
    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return pf_ppo_indices(SCORES, VALID, reweight_method="max_random", generator=generator).tolist()

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(10)}) > 1


def test_all_scores_zero_draws_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = pf_ppo_indices(torch.zeros(1000), torch.ones(1000).bool(), reweight_method="pow", generator=generator)
    assert drawn.unique().numel() > 500


def test_unknown_method() -> None:
    with pytest.raises(ValueError, match=r"unknown 'power'. Use one of: pow, max_min, max_random"):
        pf_ppo_indices(SCORES, VALID, reweight_method="power", generator=torch.Generator())
