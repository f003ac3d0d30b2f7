"""Promise 1: what a row weighs does not depend on how long the other rows of its batch happen to be."""

import pytest
import torch

from tether.loop.engine import LossSizes
from tether.text.learning.losses import Aggregation


@pytest.mark.parametrize(
    ("mode", "scale_factor", "expected"),
    [
        ("seq-mean-token-sum-norm", None, (3 + 1) / 5 / 2),
        ("token-sum-norm", None, (3 + 1) / 5),
        ("masked_mean_ratio", 6, (3 + 1) * 6 / 2 / 5 / 2),  # an episode of two steps weighs as one of 6, of 2 rows of 5
    ],
)
def test_the_width_is_that_of_the_configuration(mode: str, scale_factor: float | None, expected: float) -> None:
    loss, mask = torch.tensor([[3.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
    sizes = LossSizes(num_tokens=2, num_sequences=2)
    aggregation = Aggregation(mode, scale_factor, width=5)
    assert aggregation(loss, mask, sizes).item() == pytest.approx(expected)
    assert aggregation(loss[:, :2], mask[:, :2], sizes).item() == pytest.approx(expected)
    of_the_batch = Aggregation(mode, scale_factor)
    assert of_the_batch(loss, mask, sizes) != of_the_batch(loss[:, :2], mask[:, :2], sizes), "it would show"
