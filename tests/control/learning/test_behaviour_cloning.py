"""Behaviour cloning: what is imitated, what counts, when it ends."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tether.control.policies.mlp_policy import ControlPolicy, PolicySpec
from tether.integrations.robots.behaviour_cloning import Cloning, CloningData, CloningOptions, split_episodes, windows


def test_a_window_ends_with_its_episode():
    seen = [np.array([[0.0], [1.0], [2.0]], dtype=np.float32), np.array([[9.0]], dtype=np.float32)]
    shown = [{"state": obs, "image": obs.astype(np.uint8)} for obs in seen]
    data = windows(shown, [np.array([[10], [11], [12]]), np.array([[20]])], chunk=2)
    assert data.obs["state"].tolist() == data.obs["image"].tolist() == [[0], [1], [2], [9]]
    assert data.obs["image"].dtype == torch.uint8
    assert data.actions.tolist() == [[10, 11], [11, 12], [12, 12], [20, 20]]
    assert data.mask.tolist() == [[True, True], [True, True], [True, False], [True, False]]


def test_episodes_are_parted_whole_and_by_the_seed():
    learned, apart = split_episodes(10, 0.2, seed=3)
    assert len(apart) == 2
    assert sorted(learned + apart) == list(range(10))
    assert split_episodes(10, 0.2, seed=3) == (learned, apart)
    assert len(split_episodes(2, 0.0, seed=0)[1]) == 1
    with pytest.raises(ValueError, match="give at least 2"):
        split_episodes(1, 0.5, seed=0)


def make(data, held_out, spec, **options):
    policy = ControlPolicy(spec, seed=0)
    given = CloningOptions(**{"lr": 1e-2, "batch_size": 16, "epochs": 30, "patience": 30} | options)
    return Cloning(policy, list(policy.actor.parameters()), data, held_out, given, seed=0), policy


def parts(obs):
    return TensorDict({"state": obs}, batch_size=[len(obs)])


def signs(count, seed):
    obs = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return CloningData(parts(obs), (obs > 0).long(), torch.ones(count, 2, dtype=torch.bool))


SPEC = PolicySpec(2, (2,), 1, num_action_chunks=2, value_width=0, hidden_dim=16, num_layers=1)


def test_choices_are_imitated():
    cloning, policy = make(signs(200, 0), signs(50, 1), SPEC)
    metrics = list(cloning.run())
    assert metrics[0]["bc/held_out_loss"] == pytest.approx(np.log(2), abs=0.02)
    assert metrics[-1]["bc/best_held_out_loss"] < 0.15
    fresh = signs(100, 2)
    chosen = policy.acting()({"state": fresh.obs["state"].numpy()}, None, np.zeros((100, 0), np.float32))[0]
    assert (chosen == fresh.actions.numpy()).mean() > 0.93


def test_numbers_are_imitated():
    def linear(count, seed):
        obs = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        return CloningData(parts(obs), obs @ torch.tensor([[0.5, 0.0], [0.0, -0.5]]), torch.ones(count, 1).bool())

    cloning, policy = make(linear(300, 0), linear(50, 1), PolicySpec(2, None, 2, hidden_dim=16, num_layers=1))
    list(cloning.run())
    test = linear(50, 2)
    chosen, _ = policy.acting()({"state": test.obs["state"].numpy()}, None, np.zeros((50, 0), np.float32))
    np.testing.assert_allclose(chosen, test.actions.numpy(), atol=0.15)
    assert policy.head.logstd.tolist() == [-0.5, -0.5]


def test_what_is_masked_does_not_exist():
    data = signs(20, 0)
    mask = data.mask.clone()
    mask[::2, 1] = False
    other = torch.where(mask, data.actions, 1 - data.actions)
    first, second = (
        make(CloningData(data.obs, actions, mask), signs(10, 1), SPEC, epochs=2)[0] for actions in (data.actions, other)
    )
    assert list(first.run()) == list(second.run())
    assert first.measure(CloningData(data.obs, other, mask)) == first.measure(CloningData(data.obs, data.actions, mask))


def test_it_ends_when_nothing_is_gained_and_keeps_the_best():
    held_out = signs(50, 1)
    wrong = CloningData(held_out.obs, 1 - held_out.actions, held_out.mask)  # learning makes it worse
    cloning, policy = make(signs(200, 0), wrong, SPEC, patience=3)
    before = [value.clone() for value in policy.actor.parameters()]
    metrics = list(cloning.run())
    assert len(metrics) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, policy.actor.parameters(), strict=True))


def test_the_loss_of_all_is_the_mean_over_columns_that_count():
    data = signs(21, 0)
    data.mask[3:9, 1] = False
    cloning, policy = make(data, data, SPEC, batch_size=4)
    log_probs = policy.log_probs(policy.inputs(data.obs), data.actions)
    assert cloning.measure(data) == pytest.approx(-log_probs[data.mask].mean().item(), rel=1e-5)
