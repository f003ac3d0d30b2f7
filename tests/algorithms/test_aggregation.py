import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.cases import CASES, Case
from tether.algorithms import AGGREGATIONS, aggregate_loss, count_valid, masked_mean_ratio

LOSS = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 9 / 3),  # three tokens
        ("seq-mean-token-sum", (3 + 6) / 2),  # two rows with tokens
        ("seq-mean-token-mean", (1.5 + 6) / 2),
        ("seq-mean-token-sum-norm", (3 / 4 + 6 / 4) / 2),  # max_length 4, and two rows
        ("token-sum-norm", (3 + 6) / 4),  # no division by rows
    ],
)
def test_numbers_by_hand(mode: str, expected: float) -> None:
    counts = count_valid(MASK)
    assert aggregate_loss(LOSS, MASK, mode, **counts._asdict(), max_length=4) == expected
    assert aggregate_loss(LOSS, MASK, mode, num_tokens=3, num_sequences=2, max_length=4) == expected


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(CASES, st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_pieces_add_up_to_the_whole(mode: str, case: Case, size: int) -> None:
    denominators = count_valid(case.mask)._asdict() | {"max_length": case.mask.shape[1]}
    whole = aggregate_loss(case.advantages, case.mask, mode, **denominators)
    rows = torch.arange(len(case.mask)).split(size)
    shares = [aggregate_loss(case.advantages[r], case.mask[r], mode, **denominators) for r in rows]
    assert torch.stack(shares).sum() == pytest.approx(float(whole), abs=1e-12)


def test_a_denominator_of_the_piece_would_change_the_loss() -> None:
    """The negative control: the mean of per-piece token means, which some trainers compute, is another number."""
    means = [
        aggregate_loss(LOSS[r], MASK[r], "token-mean", num_tokens=n, num_sequences=1) for r, n in (([0], 2), ([1], 1))
    ]
    assert sum(means) / 2 == pytest.approx((1.5 + 6) / 2)
    assert sum(means) / 2 != aggregate_loss(LOSS, MASK, "token-mean", num_tokens=3, num_sequences=2)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_valid_is_zero(mode: str) -> None:
    nothing = torch.zeros_like(MASK)
    assert aggregate_loss(LOSS * torch.nan, nothing, mode, num_tokens=0, num_sequences=0, max_length=3) == 0
    zero = torch.tensor(0)
    assert aggregate_loss(LOSS * torch.nan, nothing, mode, num_tokens=zero, num_sequences=zero, max_length=3) == 0


def test_bad_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, seq-mean-token-sum"):
        aggregate_loss(LOSS, MASK, "mean", num_tokens=3, num_sequences=2)
    for mode in ("seq-mean-token-sum-norm", "token-sum-norm"):
        with pytest.raises(ValueError, match=f"^{mode} needs max_length"):
            aggregate_loss(LOSS, MASK, mode, num_tokens=3, num_sequences=2)


def test_masked_mean_ratio_by_hand() -> None:
    # Episodes of 2 and 1 live steps of at most 4: (1 + 2) * 4/2 + 6 * 4/1 = 30, over 9 elements.
    length = MASK.sum(dim=-1, keepdim=True)
    full = masked_mean_ratio(LOSS, MASK, episode_length=length, max_episode_length=4, num_elements=9)
    assert full == pytest.approx(30 / 9)
    shares = [
        masked_mean_ratio(LOSS[r], MASK[r], episode_length=length[r], max_episode_length=4, num_elements=9)
        for r in ([0, 2], [1])
    ]
    assert sum(shares) == pytest.approx(30 / 9)
