"""From rows to the model's tokens: the module's small example by hand, and the two layouts against each other."""

import pytest
import torch

from tests.training.batches import make_rollout
from tether.batch import RolloutBatch, TrainBatch
from tether.models.attention import Packed, Padded
from tether.training.tokens import TokenRows, sequence_lengths, token_rows


def example() -> TrainBatch:
    """Prompt 5 6 7 with answer 8 . 2, whose middle token the policy did not sample; prompt 4 with answer 9."""
    rollout = RolloutBatch(
        uid=torch.tensor([0, 1]),
        prompt_ids=torch.tensor([[5, 6, 7], [4, 0, 0]]),
        prompt_length=torch.tensor([3, 1]),
        response_ids=torch.tensor([[8, 1, 2], [9, 0, 0]]),
        response_length=torch.tensor([3, 1]),
        response_mask=torch.tensor([[True, False, True], [True, False, False]]),
        rollout_log_probs=torch.zeros(2, 3),
        truncated=torch.tensor([False, True]),
        batch_size=[2],
    )
    return TrainBatch.assemble(rollout, torch.ones(2))


def test_packed_by_hand() -> None:
    rows = token_rows(example(), packed=True)
    assert rows.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 4, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert rows.layout == Packed((6, 2))
    assert rows.predicts.tolist() == [2, 4, 6]
    assert rows.targets.tolist() == [8, 2, 9]
    assert rows.slots.tolist() == [0, 2, 3]
    assert rows.ends.tolist() == [5, 7]
    assert sequence_lengths(example()).tolist() == [6, 2]


def test_padded_by_hand() -> None:
    rows = token_rows(example(), packed=False)
    assert rows.input_ids.tolist() == [[5, 6, 7, 8, 1, 2], [4, 9, 0, 0, 0, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]
    assert rows.layout == Padded()
    assert rows.predicts.tolist() == [2, 4, 6]
    assert (rows.targets.tolist(), rows.slots.tolist()) == ([8, 2, 9], [0, 2, 3])
    assert rows.ends.tolist() == [5, 7]


def test_scatter_puts_each_value_in_its_slot_and_carries_gradients() -> None:
    rows = token_rows(example(), packed=True)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    placed = rows.scatter(values)
    assert placed.tolist() == [[1, 0, 2], [3, 0, 0]]
    (placed * torch.tensor([[10.0, 20, 30], [40, 50, 60]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [10, 30, 40]


@pytest.mark.parametrize("packed", [True, False])
def test_each_target_stands_right_after_its_predicting_position(packed: bool) -> None:
    batch = TrainBatch.assemble(make_rollout(), torch.tensor([1.0] * 8 + [torch.nan]))
    rows: TokenRows = token_rows(batch, packed=packed)
    assert rows.input_ids.flatten()[rows.predicts + 1].equal(rows.targets)
    assert rows.targets.equal(batch.response_ids[batch.response_mask])
    assert rows.input_ids.numel() == (
        int(sequence_lengths(batch).sum()) if packed else 9 * int(sequence_lengths(batch).max())
    )
