"""Batch metrics against numbers worked by hand, and against what must not reach them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.batch import RolloutBatch, TrainBatch
from tether.metrics.data import (
    data_metrics,
    group_metrics,
    identical_replies,
    length_metrics,
    mismatch_metrics,
    repeated_sequences,
)
from tether.metrics.keys import METRICS
from tether.metrics.timing import memory_metrics, throughput_metrics


def rollout(lengths: list[int], width: int = 3) -> RolloutBatch:
    rows = len(lengths)
    length = torch.tensor(lengths)
    return RolloutBatch(
        uid=torch.arange(rows),
        prompt_ids=torch.ones(rows, 4, dtype=torch.long),
        prompt_length=torch.tensor([2, 4, 3, 4][:rows]),
        response_ids=torch.ones(rows, width, dtype=torch.long),
        response_length=length,
        response_mask=torch.arange(width) < length[:, None],
        rollout_log_probs=torch.zeros(rows, width),
        truncated=length == width,
        kept=None,
        batch_size=[rows],
    )


def filled_batch(garbage: float = 0.0) -> TrainBatch:
    """Two scored rows and one without a score; `garbage` stands wherever no metric may look."""
    batch = TrainBatch.assemble(rollout([2, 1, 3]), torch.tensor([1.0, 0.5, float("nan")]))

    def tensor(values: list[list[float]]) -> Tensor:
        return torch.where(batch.response_mask, torch.tensor(values), garbage)

    batch.token_level_scores = torch.where(batch.response_mask, batch.token_level_scores, garbage)
    batch.token_level_rewards = tensor([[-0.1, 0.9, 0.0], [0.25, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch.advantages = tensor([[1.0, 2.0, 0.0], [-3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch.returns = tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch.values = tensor([[1.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    return batch


def test_worked_example() -> None:
    metrics = data_metrics(filled_batch(), max_prompt_length=4)
    expected = {
        "critic/score/mean": 0.75, "critic/score/max": 1.0, "critic/score/min": 0.5,
        "critic/rewards/mean": 0.525, "critic/rewards/max": 0.8, "critic/rewards/min": 0.25,
        "critic/advantages/mean": 0.0, "critic/advantages/max": 2.0, "critic/advantages/min": -3.0,
        "critic/returns/mean": 2.0, "critic/returns/max": 3.0, "critic/returns/min": 1.0,
        "critic/values/mean": 5 / 3, "critic/values/max": 2.0, "critic/values/min": 1.0,
        "reward/excluded_rows": 1.0,
        "response_length/mean": 2.0, "response_length/max": 3.0, "response_length/min": 1.0,
        "response_length/clip_ratio": 1 / 3, "response/identical_fraction": 0.5,
        "prompt_length/mean": 3.0, "prompt_length/max": 4.0, "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 1 / 3,
    }  # fmt: skip
    assert metrics == pytest.approx(expected, abs=1e-7)


def test_identical_replies_over_different_prompts() -> None:
    batch = TrainBatch.assemble(rollout([2, 2, 3, 2]), torch.tensor([1.0, 0.5, 0.0, float("nan")]))
    assert identical_replies(batch) == {"response/identical_fraction": 2 / 3}  # the last row has no score
    batch.response_ids[0, 2] = 9  # beyond its length
    assert identical_replies(batch) == {"response/identical_fraction": 2 / 3}
    batch.response_ids[0, 1] = 9
    assert identical_replies(batch) == {"response/identical_fraction": 1 / 3}
    batch.prompt_length = torch.full((4,), 2)
    assert identical_replies(batch) == {}


def test_repeated_sequences_of_four_tokens() -> None:
    """ab ab ab ab: five, two of them distinct. Then eight different ones; five of one token; and three tokens."""
    batch = TrainBatch.assemble(rollout([8, 8, 5, 3], width=8), torch.tensor([1.0, 1.0, float("nan"), 1.0]))
    batch.response_ids[0] = torch.tensor([7, 9] * 4)
    batch.response_ids[1] = torch.arange(8)
    batch.response_ids[2] = 7
    assert repeated_sequences(batch) == {"response/repeated_fraction": pytest.approx((0.6 + 0) / 2)}
    batch.response_mask[0, 4] = False  # said by a tool: abab is left, and between them nothing
    assert repeated_sequences(batch) == {"response/repeated_fraction": 0}
    batch.response_mask[:2, 3] = False
    assert repeated_sequences(batch) == {"response/repeated_fraction": 0}
    assert repeated_sequences(TrainBatch.assemble(rollout([3, 3]), torch.ones(2))) == {}


@pytest.mark.parametrize("garbage", [1e9, float("nan"), float("inf")])
def test_what_is_masked_does_not_exist(garbage: float) -> None:
    clean = data_metrics(filled_batch(), max_prompt_length=4)
    assert data_metrics(filled_batch(garbage), max_prompt_length=4) == clean
    mask = torch.tensor([[True, True, False]])
    dirty = torch.tensor([[-0.5, -0.2, garbage]])
    other = torch.tensor([[-0.4, -0.3, garbage]])
    expected = mismatch_metrics(dirty[:, :2], other[:, :2], mask[:, :2])
    assert mismatch_metrics(dirty, other, mask) == expected
    scored = torch.tensor([True, True, False])
    scores = torch.tensor([1.0, 0.0, garbage])
    assert group_metrics(scores, torch.zeros(3, dtype=torch.long), scored)["group/score_std_mean"] == 0.5


def test_fields_that_are_not_there_yet_are_left_out() -> None:
    batch = TrainBatch.assemble(rollout([2, 1]), torch.tensor([1.0, 0.5]))
    metrics = data_metrics(batch, max_prompt_length=4)
    assert metrics["critic/score/mean"] == 0.75
    assert not [key for key in metrics if "rewards" in key or "values" in key or "explained" in key]


def test_a_batch_without_a_single_score_has_no_score_statistics() -> None:
    batch = TrainBatch.assemble(rollout([2, 1]), torch.full((2,), float("nan")))
    batch.advantages = batch.returns = batch.values = torch.zeros(2, 3)
    metrics = data_metrics(batch, max_prompt_length=4)
    assert not [key for key in metrics if key.startswith("critic/")]
    assert metrics["reward/excluded_rows"] == 2
    assert all(math.isfinite(value) for value in metrics.values())


def test_group_metrics() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, 9.0, 9.0])
    uid = torch.tensor([0, 0, 7, 7, 3, 4, 4])
    scored = torch.tensor([True, True, True, True, True, True, False])
    # groups 0 (equal) and 7 (0, 1) count; 3 and 4 have one scored response each
    assert group_metrics(scores, uid, scored) == {"group/zero_std_fraction": 0.5, "group/score_std_mean": 0.25}
    assert group_metrics(scores[4:], uid[4:], scored[4:]) == {}
    tenths = torch.full((3,), 0.1)  # whose mean is not exactly 0.1
    assert group_metrics(tenths, torch.zeros(3).long(), torch.ones(3).bool())["group/zero_std_fraction"] == 1.0


def test_mismatch_worked_example() -> None:
    sampler, trainer = torch.tensor([[0.5, 0.8]]).log(), torch.tensor([[0.4, 0.9]]).log()
    metrics = mismatch_metrics(sampler, trainer, torch.ones(1, 2, dtype=torch.bool))
    first, second = math.log(0.4 / 0.5), math.log(0.9 / 0.8)
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": 0.1,
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_std": 0.0,
            "training/rollout_actor_probs_pearson_corr": 1.0,
            "rollout_corr/kl": -(first + second) / 2,
            "rollout_corr/k3_kl": ((0.8 - 1 - first) + (1.125 - 1 - second)) / 2,
        },
        abs=1e-6,
    )


def test_mismatch_of_equal_log_probs_is_exactly_nothing() -> None:
    log_probs = torch.tensor([[-0.3, -0.3], [-2.0, -0.1]])
    for mask in (torch.ones(2, 2, dtype=torch.bool), torch.tensor([[True, True], [False, False]])):
        metrics = mismatch_metrics(log_probs, log_probs, mask)
        assert metrics.pop("training/rollout_actor_probs_pearson_corr") == pytest.approx(1.0)
        assert set(metrics.values()) == {0.0}
    assert mismatch_metrics(log_probs, log_probs, torch.zeros(2, 2, dtype=torch.bool)) == {}
    constant = mismatch_metrics(torch.zeros(1, 2), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert constant["training/rollout_actor_probs_pearson_corr"] == 0.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=8))
def test_mismatch_is_finite_and_k3_is_not_negative(pairs: list[tuple[float, float]]) -> None:
    sampler, trainer = torch.tensor(pairs).T[:, None]
    metrics = mismatch_metrics(sampler, trainer, torch.ones_like(sampler, dtype=torch.bool))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout_corr/k3_kl"] >= 0
    assert abs(metrics["training/rollout_actor_probs_pearson_corr"]) <= 1 + 1e-9


def test_every_emitted_key_is_explained() -> None:
    log_probs, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    emitted = {
        **data_metrics(filled_batch(), max_prompt_length=4),
        **group_metrics(torch.zeros(2), torch.zeros(2).long(), torch.ones(2).bool()),
        **mismatch_metrics(log_probs, log_probs, mask),
        **throughput_metrics(1, 1.0),
        **memory_metrics(),
        **length_metrics(torch.ones(1), torch.ones(1), torch.ones(1).bool(), max_prompt_length=1),
    }
    assert set(emitted) <= set(METRICS)
