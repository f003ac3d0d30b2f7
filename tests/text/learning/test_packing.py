"""From rows to the model's tokens: the module's small example by hand, and the two layouts against each other."""

import pytest
import torch

from tests.text.learning.batches import make_batch, make_critic, make_policy, make_rollout
from tether.batch import KeptTokens, RolloutBatch, TrainBatch, filled, on_device
from tether.loop.engine import LossSizes
from tether.text.learning.losses import CriticLoss, PolicyForward, PolicyLoss, PolicyOutputs, ValueOutputs
from tether.text.learning.packing import TokenRows, row_sizes, sequence_lengths, token_rows
from tether.text.models.layers import Packed, Padded
from tether.text.models.output import hidden_states


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
        kept=None,
        batch_size=[2],
    )
    return TrainBatch.assemble(rollout, torch.ones(2))


def test_packed_by_hand() -> None:
    rows = token_rows(example(), packed=True)
    assert rows.input_ids.tolist() == [[5, 6, 7, 8, 1, 2, 4, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert rows.layout == Packed((3, 3, 1, 1), (None, 0, None, 2))
    assert rows.predicts.tolist() == [2, 4, 6]
    assert rows.targets.tolist() == [8, 2, 9]
    assert rows.slots.tolist() == [0, 2, 3]
    assert rows.ends.tolist() == [5, 7]
    assert sequence_lengths(example()).tolist() == [6, 2]


def test_a_shared_prompt_stands_once() -> None:
    """The two answers to prompt 5 6 both begin after its 6; between them stands the row of another prompt."""
    rollout = RolloutBatch(
        uid=torch.tensor([0, 1, 0]),
        prompt_ids=torch.tensor([[5, 6, 0], [5, 6, 7], [5, 6, 9]]),
        prompt_length=torch.tensor([2, 3, 2]),
        response_ids=torch.tensor([[8, 2], [9, 0], [3, 4]]),
        response_length=torch.tensor([2, 1, 2]),
        response_mask=torch.tensor([[True, True], [True, False], [True, True]]),
        rollout_log_probs=torch.zeros(3, 2),
        truncated=torch.zeros(3, dtype=torch.bool),
        kept=None,
        batch_size=[3],
    )
    batch = TrainBatch.assemble(rollout, torch.ones(3))
    rows = token_rows(batch, packed=True)
    assert row_sizes(batch) == [(0, 2, 2), (1, 3, 1), (0, 2, 2)]
    assert rows.input_ids.tolist() == [[5, 6, 8, 2, 3, 4, 5, 6, 7, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 0, 1, 2, 3]]
    assert rows.layout == Packed((2, 2, 2, 3, 1), (None, 0, 0, None, 3))
    assert rows.targets.tolist() == [8, 2, 9, 3, 4]
    assert rows.predicts.tolist() == [1, 2, 8, 1, 4]
    assert rows.ends.tolist() == [3, 9, 5]


def repeated() -> TrainBatch:
    """Four answers to prompt 5 6 of which two are equal and a third one begins like them."""
    rollout = RolloutBatch(
        uid=torch.tensor([0, 0, 0, 0]),
        prompt_ids=torch.tensor([[5, 6]] * 4),
        prompt_length=torch.tensor([2] * 4),
        response_ids=torch.tensor([[8, 2], [3, 0], [8, 2], [8, 4]]),
        response_length=torch.tensor([2, 1, 2, 2]),
        response_mask=torch.tensor([[True, True], [True, False], [True, True], [True, True]]),
        rollout_log_probs=torch.zeros(4, 2),
        truncated=torch.zeros(4, dtype=torch.bool),
        kept=None,
        batch_size=[4],
    )
    return TrainBatch.assemble(rollout, torch.ones(4))


def test_equal_responses_to_a_prompt_stand_once() -> None:
    rows = token_rows(repeated(), packed=True)
    assert rows.input_ids.tolist() == [[5, 6, 8, 2, 3, 8, 4]]
    assert rows.layout == Packed((2, 2, 1, 2), (None, 0, 0, 0))
    assert (rows.predicts.tolist(), rows.targets.tolist()) == ([1, 2, 1, 5], [8, 2, 3, 4])
    assert rows.slots.tolist() == [0, 1, 2, 7]
    assert rows.ends.tolist() == [3, 4, 3, 6]
    assert rows.scatter(torch.tensor([1.0, 2, 3, 4])).tolist() == [[1, 2], [3, 0], [1, 2], [1, 4]]


def test_equal_responses_have_the_gradients_that_they_have_apart() -> None:
    policy, batch = make_policy(), repeated()
    weights = torch.randn(batch.response_ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = []
    for packed in (True, False):
        policy.zero_grad()
        outputs = PolicyForward(packed=packed, with_entropy=True)(policy, batch)
        assert outputs.entropy is not None
        ((outputs.log_probs + outputs.entropy) * weights).sum().backward()
        gradients.append(torch.cat([filled(weight.grad).flatten() for weight in policy.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_responses_with_a_recorded_cut_or_recorded_experts_stand_apart() -> None:
    """Two samplers may have recorded different ones of the same tokens."""
    batch = repeated()
    assert token_rows(batch, packed=True, experts="replayed").targets.tolist() == [8, 2, 3, 8, 2, 8, 4]
    words = [torch.tensor(row, dtype=torch.int32) for row in ([8, 2], [3], [1, 8, 2], [8, 4])]
    batch.kept = KeptTokens(torch.tensor([[1, 1], [1, 0], [2, 1], [1, 1]]), words, batch_size=[4])
    assert token_rows(batch, packed=True).slots.tolist() == [0, 1, 2, 4, 5, 6, 7]


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
def test_each_target_follows_its_predicting_position(packed: bool) -> None:
    batch = TrainBatch.assemble(make_rollout(), torch.tensor([1.0] * 8 + [torch.nan]))
    rows: TokenRows = token_rows(batch, packed=packed)
    ids, positions = rows.input_ids.flatten(), rows.position_ids.flatten()
    assert rows.targets.equal(batch.response_ids[batch.response_mask])
    row, column = batch.response_mask.nonzero(as_tuple=True)
    assert positions[rows.predicts].equal(batch.prompt_length[row] + column - 1)
    before = torch.where(
        column == 0, batch.prompt_ids[row, batch.prompt_length[row] - 1], batch.response_ids[row, column - 1]
    )
    assert ids[rows.predicts].equal(before)


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_of_a_micro_batch_is_read_back_from_the_device(packed: bool) -> None:
    """The meta device has no numbers to read, and refuses to meet a tensor of the host."""
    policy, meta = make_policy(), torch.device("meta")
    batch = make_batch(policy, make_critic())
    rows = on_device(token_rows(batch, packed=packed), meta)
    states = hidden_states(policy.to(meta), rows.input_ids, rows.position_ids, rows.layout)
    per_token = rows.scatter(states[rows.predicts].sum(dim=-1))
    micro, sizes = batch.to(meta), LossSizes(num_tokens=10, num_sequences=3)
    outputs = PolicyOutputs(log_probs=per_token, entropy=per_token, batch_size=[len(batch)])
    PolicyLoss(kl_coef=0.1, entropy_coeff=0.1)(outputs, micro, sizes).loss.backward(retain_graph=True)
    CriticLoss()(ValueOutputs(values=per_token, batch_size=[len(batch)]), micro, sizes).loss.backward()
    with pytest.raises(RuntimeError, match="meta"):
        per_token.sum().item()  # the control: a number that is read does not pass


def test_rows_of_one_uid_have_one_prompt() -> None:
    rollout = make_rollout()
    rollout.prompt_ids[1, rollout.prompt_length[1] :] = 99  # beyond the prompt, where nothing is read
    TrainBatch.assemble(rollout, torch.ones(9))
    rollout.prompt_ids[4, 0] += 1
    with pytest.raises(AssertionError, match=r"uid: rows \[4\]"):
        TrainBatch.assemble(rollout, torch.ones(9))
    shorter = make_rollout()
    shorter.prompt_length[2] -= 1
    with pytest.raises(AssertionError, match=r"uid: rows \[2\]"):
        TrainBatch.assemble(shorter, torch.ones(9))
