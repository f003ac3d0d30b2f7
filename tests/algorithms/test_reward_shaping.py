import math

import pytest
import torch

from tether.algorithms import RunningRewardNormalizer, normalize_rewards_per_batch, overlong_penalty

NAN = math.nan


def test_overlong_penalty() -> None:
    # Of at most 10, the last 4 are the buffer: 0 up to 6, then a quarter of the factor 2 for each token.
    length = torch.tensor([0, 6, 7, 9, 10])
    assert overlong_penalty(length, max_length=10, buffer_length=4, penalty_factor=2.0).tolist() == [
        0,
        0,
        -0.5,
        -1.5,
        -2,
    ]


def test_per_batch() -> None:
    scores, valid = torch.tensor([1.0, 3.0, NAN]), torch.tensor([True, True, False])
    torch.testing.assert_close(
        normalize_rewards_per_batch(scores, valid), torch.tensor([-1.0, 1.0, 0.0]) / math.sqrt(2)
    )


def test_running_moments_are_those_of_all_scores() -> None:
    normalizer = RunningRewardNormalizer()
    for batch in ([1e6 + 1.0, 1e6 + 4.0, NAN], [NAN, NAN, NAN], [1e6 + 10.0, NAN, NAN]):
        scores = torch.tensor(batch, dtype=torch.float64)
        normalizer.update(scores, ~scores.isnan())
    # 1, 4, 10: mean 5, squares 16 + 1 + 25 = 42, variance 21
    assert normalizer.mean == pytest.approx(1e6 + 5)
    assert normalizer.squares == pytest.approx(42)
    scores, valid = torch.tensor([1e6 + 5 + math.sqrt(21), NAN], dtype=torch.float64), torch.tensor([True, False])
    assert normalizer.normalize(scores, valid).tolist() == pytest.approx([1, 0])


def test_running_normalizer_without_a_spread() -> None:
    normalizer, valid = RunningRewardNormalizer(), torch.tensor([True])
    assert normalizer.normalize(torch.tensor([3.0]), valid).tolist() == [3]
    for _ in range(3):
        normalizer.update(torch.tensor([2.0]), valid)
    assert normalizer.normalize(torch.tensor([2.0]), valid).tolist() == [0]
    assert normalizer.normalize(torch.tensor([5.0]), valid).tolist() == [3]


def test_running_normalizer_resumes_exactly() -> None:
    first, second = torch.tensor([0.1, 0.7]), torch.tensor([0.3, 0.9])
    valid = torch.tensor([True, True])
    straight, before, after = RunningRewardNormalizer(), RunningRewardNormalizer(), RunningRewardNormalizer()
    straight.update(first, valid)
    before.update(first, valid)
    after.load_state_dict(before.state_dict())
    straight.update(second, valid)
    after.update(second, valid)
    assert after.state_dict() == straight.state_dict()
