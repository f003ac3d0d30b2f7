"""Policies with a CNN or an LSTM: what they compute, how they act, and what a file gives back."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tether.control.policies.mlp_policy import WEIGHTS_FILE, load_policy, make_policy, save_policy
from tether.control.policies.network_policy import Cnn, run_sequences, run_steps, uniform_lstm
from tether.control.policies.networks import ActionSampler, StateDependentHead
from tether.control.policies.spec import FlatRow, Memory, Pictures, PolicySpec
from tether.observations import ObsPart

SMALL = {"hidden_dim": 6, "num_layers": 1, "activation": "relu"}
LAYOUT = (
    ObsPart("hand", "vector", (2,)),
    ObsPart("image", "image", (3, 4, 2), "uint8"),
    ObsPart("goal", "vector", (1,), "int64", (4,)),
)
PICTURED = {"layout": LAYOUT, "pictures": ("image",), "pixel_scale": 10.0}
SPECS = {
    "cnn": PolicySpec(6, (3,), 1, **SMALL, **PICTURED, share_critic=True),
    "two cnns": PolicySpec(6, None, 2, **SMALL, **PICTURED, normalize_observations=True, critic_num_layers=3),
    "lstm": PolicySpec(5, (3,), 1, **SMALL, lstm_dim=4, share_critic=True),
    "two lstms": PolicySpec(5, (3, 2), 2, **SMALL, lstm_dim=4, normalize_observations=True, critic_hidden_dim=3),
    "cnn and lstm": PolicySpec(6, None, 2, **SMALL, **PICTURED, lstm_dim=4, num_action_chunks=2, value_width=2),
    "noise by state": PolicySpec(5, None, 2, **SMALL, use_sde=True, sde_sample_freq=3, normalize_observations=True),
    "noise by memory": PolicySpec(5, None, 1, **SMALL, use_sde=True, lstm_dim=4),
    "no critic": PolicySpec(5, (3,), 1, **SMALL, lstm_dim=4, value_width=0),
}


def make(spec):
    policy = make_policy(spec, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    if policy.normalizer:
        policy.normalizer.update(1 + 2 * torch.randn(50, len(policy.normalizer.mean), generator=generator))
    return policy


def draw(spec, *shape, seed=1):
    """Observations of whole numbers from 0 to 10, as a picture of things has; of choices from 0 to 3."""
    rng = np.random.default_rng(seed)
    return {
        part.name: rng.integers(0, 4 if part.choices else 11, (*shape, *part.shape)).astype(part.dtype)
        for part in spec.parts
    }


def at(obs, *index):
    return {name: part[index] for name, part in obs.items()}


def seen(policy, obs):
    """Observations as the networks read them."""
    return policy.inputs({name: torch.from_numpy(part) for name, part in obs.items()})


def test_a_flat_row_by_hand():
    row = FlatRow((*LAYOUT, ObsPart("task", "text", (2,), "uint8")), without=("image",))
    obs = {
        "hand": torch.tensor([[0.5, -1.0]]),
        "goal": torch.tensor([[2]]),
        "task": torch.tensor([[97, 0]], dtype=torch.uint8),
    }
    assert row(obs).tolist() == [[0.5, -1, 0, 0, 1, 0, 97, 0]]
    assert row(obs).dtype == torch.float32
    assert row.width == 8
    alone = FlatRow(LAYOUT[:1])
    assert alone(obs) is obs["hand"]  # the usual case costs nothing
    assert FlatRow(LAYOUT[1:2], without=("image",))({"image": torch.zeros(5, 7, 3, 4, 2)}).shape == (5, 7, 0)


def test_pictures_are_stacked_as_bytes():
    layout = (ObsPart("left", "image", (2, 2, 1), "uint8"), ObsPart("right", "image", (2, 2, 2), "uint8"))
    pictures = Pictures(layout, ("left", "right"))
    left, right = torch.arange(4, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
    stacked = pictures({"left": left.view(1, 2, 2, 1), "right": right.view(1, 2, 2, 2)})
    assert pictures.shape == (3, 2, 2)
    assert stacked.dtype == torch.uint8
    assert stacked[0].tolist() == [[[0, 1], [2, 3]], [[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_the_nature_cnn_is_that_of_the_paper():
    net = Cnn((4, 84, 84), "nature", "relu", 255.0, torch.Generator())
    assert [tuple(layer.weight.shape) for layer in net.layers] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert net.features == 3136
    picture = torch.randint(0, 256, (2, 5, 4, 84, 84), dtype=torch.uint8)
    first = nn.functional.conv2d(picture.flatten(0, 1) / 255.0, net.layers[0].weight, stride=4).relu()
    second = nn.functional.conv2d(first, net.layers[1].weight, stride=2).relu()
    expected = nn.functional.conv2d(second, net.layers[2].weight).relu().flatten(1)
    torch.testing.assert_close(net(picture), expected.unflatten(0, (2, 5)))


@pytest.mark.parametrize("size", [(3, 7, 7), (1, 1, 1), (2, 5, 3)])
def test_the_small_cnn_fits_any_picture(size):
    net = Cnn(size, "small", "tanh", 10.0, torch.Generator())
    assert net(torch.zeros(2, *size, dtype=torch.uint8)).shape == (2, net.features)


def stepped(lstm, x, starts, state):
    """Outputs and last cells of sequences of torch's LSTM, a step at a time, with its state reset by hand."""
    outputs, (hidden, cell) = [], (part[None].contiguous() for part in state.chunk(2, dim=1))
    for t in range(x.shape[1]):
        keep = (~starts[:, t, None]).to(x.dtype)
        output, (hidden, cell) = lstm(x[None, :, t], (hidden * keep, cell * keep))
        outputs.append(output[0])
    return torch.stack(outputs, dim=1), cell[0]


# Pieces of one step, of all steps, of lengths with and without others like them, and a start at the very end.
STARTS = {
    "none": [(), (), ()],
    "the first steps": [(0,), (0,), (0,)],
    "every step": [range(9), range(9), range(9)],
    "here and there": [(0, 4), (1, 2, 8), ()],
}


@pytest.mark.parametrize("places", STARTS.values(), ids=STARTS)
def test_sequences_are_cut_where_episodes_begin(places):
    lstm = uniform_lstm(3, 4, torch.Generator().manual_seed(0)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 9, 3, dtype=torch.float64, generator=generator).requires_grad_()
    state = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    starts = torch.zeros(3, 9, dtype=torch.bool)
    for row, steps in enumerate(places):
        starts[row, list(steps)] = True
    expected, cell = stepped(lstm, x, starts, state)
    found, states = run_sequences(lstm, x, starts, state), run_steps(lstm, x, starts, state)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(states[..., :4], expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(states[:, -1, 4:], cell, rtol=1e-12, atol=1e-14)
    weighted = torch.randn(3, 9, 4, dtype=torch.float64, generator=generator)
    learned = [x, *lstm.parameters()]
    for mine, other in zip(
        torch.autograd.grad((found * weighted).sum(), learned),
        torch.autograd.grad((expected * weighted).sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)


def test_an_episode_knows_nothing_of_the_one_before():
    lstm = uniform_lstm(3, 4, torch.Generator().manual_seed(0))
    x, state, starts = torch.randn(2, 6, 3), torch.randn(2, 8), torch.zeros(2, 6, dtype=torch.bool)
    starts[0, 4] = starts[1, 0] = True
    for run in (run_sequences, run_steps):
        states = run(lstm, x, starts, state)
        nothing, never = torch.zeros(1, 8), torch.zeros_like(starts)
        torch.testing.assert_close(states[:1, :4], run(lstm, x[:1, :4], never[:1, :4], state[:1]))
        torch.testing.assert_close(states[:1, 4:], run(lstm, x[:1, 4:], never[:1, 4:], nothing))
        torch.testing.assert_close(states[1:], run(lstm, x[1:], never[1:], nothing))


def test_weights_of_an_lstm_load_into_torchs(tmp_path):
    save_policy(make(SPECS["lstm"]), tmp_path / "policy")
    weights = load_file(tmp_path / "policy" / WEIGHTS_FILE)
    theirs = nn.LSTM(6, 4)
    theirs.load_state_dict({name: weights[f"torso.lstm.{name}"] for name, _ in theirs.named_parameters()})


def test_weights_of_the_lstm_before_are_refused_by_name(tmp_path):
    save_policy(make(SPECS["lstm"]), tmp_path / "policy")
    file = tmp_path / "policy" / WEIGHTS_FILE
    weights = {name: value for name, value in load_file(file).items() if ".lstm." not in name}
    save_file(weights | {"torso.lstm.inputs.weight": torch.zeros(16, 6)}, file)
    with pytest.raises(ValueError, match=r"policy\.safetensors.*torso\.lstm\.inputs\.weight.*train"):
        load_policy(tmp_path / "policy")


@pytest.mark.parametrize("name", SPECS)
def test_acting_and_learning_see_the_same(name):
    policy, decisions, columns = make(SPECS[name]), 5, 4
    rows = draw(policy.spec, columns, decisions + 1)
    starts = torch.zeros(columns, decisions + 1, dtype=torch.bool)
    starts[0, 0] = starts[1, 3] = True
    before = torch.randn(columns, policy.state_width, generator=torch.Generator().manual_seed(2))
    final_at = torch.tensor([3, 1]), torch.tensor([2, 4])
    final_rows = draw(policy.spec, 2, seed=7)
    review = policy.review(seen(policy, rows), starts, before, seen(policy, final_rows), final_at)

    act, state, states = policy.acting(), before.numpy().copy(), []
    for t in range(decisions):
        state[starts[:, t].numpy()] = 0
        chosen, state = act(at(rows, slice(None), t), None, state)
        states.append(state.copy())
        best = review.outputs[:, t]
        if policy.spec.choices is None:
            torch.testing.assert_close(torch.from_numpy(chosen), best[:, : policy.head.width], atol=1e-5, rtol=1e-5)
        else:
            expected = torch.stack([part.argmax(1) for part in best.split(policy.spec.choices, 1)], 1)
            assert chosen.tolist() == expected.tolist()

    memory = None
    if policy.state_width:
        memory = Memory(starts[:, :-1], before, torch.ones(columns, decisions, dtype=torch.bool))
        obs = seen(policy, at(rows, slice(None), slice(-1)))
    else:
        obs = seen(policy, at(rows, slice(None), slice(-1))).flatten(0, 1)
    passed = policy.run(obs, memory)
    torch.testing.assert_close(passed.outputs, review.outputs.flatten(0, 1), atol=1e-5, rtol=1e-5)
    if policy.critic is None:
        assert passed.values is review.values is review.final_values is None
        return
    torch.testing.assert_close(passed.values, review.values[:, :-1].flatten(0, 1), atol=1e-5, rtol=1e-5)
    for row, (column, t) in enumerate(zip(*(part.tolist() for part in final_at), strict=True)):
        with torch.no_grad():
            after = torch.from_numpy(states[t][column : column + 1])
            value = policy.step(seen(policy, at(final_rows, slice(row, row + 1))).unsqueeze(1), None, after)[1][0, 0]
        torch.testing.assert_close(review.final_values[row], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_a_review_in_pieces_says_the_same(name):
    policy = make(SPECS[name])
    rows, starts = draw(policy.spec, 5, 4), torch.rand(5, 4) < 0.3
    nobody = torch.zeros(0).long(), torch.zeros(0).long()
    arguments = (
        seen(policy, rows),
        starts,
        torch.zeros(5, policy.state_width),
        seen(policy, draw(policy.spec, 0)),
        nobody,
    )
    whole = policy.review(*arguments)
    policy.micro_batch = 8
    pieces = policy.review(*arguments)
    torch.testing.assert_close(pieces.outputs, whole.outputs)
    if policy.critic is not None:
        torch.testing.assert_close(pieces.values, whole.values)
        assert whole.final_values.shape == (0, policy.spec.value_width)


@pytest.mark.parametrize("name", SPECS)
def test_saved_and_loaded(name, tmp_path):
    policy = make(SPECS[name])
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.spec == policy.spec
    rows, state = draw(policy.spec, 9), np.ones((9, policy.state_width), dtype=np.float32)
    for left, right in zip(loaded.acting()(rows, None, state), policy.acting()(rows, None, state), strict=True):
        assert np.array_equal(left, right)


def test_first_weights_are_those_of_the_literature_and_the_policy_begins_undecided():
    policy = make_policy(SPECS["cnn and lstm"], seed=0)
    for weight in policy.torso.lstm.parameters():
        assert 0.3 < weight.abs().max() <= 0.5  # 4^-0.5
    weight = policy.torso.cnn.layers[1].weight.flatten(1)
    torch.testing.assert_close(weight @ weight.t(), 2 * torch.eye(32), atol=1e-5, rtol=0)
    assert policy.actor.weight.abs().max() < 0.1
    again = make_policy(SPECS["cnn and lstm"], seed=0)
    assert all(torch.equal(*pair) for pair in zip(policy.parameters(), again.parameters(), strict=True))


# --- noise that depends on the state -------------------------------------------------------------------------------


def test_state_dependent_noise_by_hand():
    """Features (3, 4) with std (1, 2): variance 9 * 1 + 16 * 4 = 73; the action is 2 standard deviations away."""
    head = StateDependentHead(1, 2, 0.0, None)
    with torch.no_grad():
        head.logstd.copy_(torch.tensor([[0.0], [math.log(2.0)]]))
    outputs = torch.tensor([[0.5, 3.0, 4.0]])
    std = math.sqrt(73 + 1e-6)
    done = head.evaluate(outputs, torch.tensor([[0.5 + 2 * std]]))
    assert done.log_probs.item() == pytest.approx(-2 - math.log(std) - 0.5 * math.log(2 * math.pi))
    assert done.entropy.item() == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi) + math.log(std))
    noise = np.array([[0.1, -0.2]], dtype=np.float32)
    # 0.5 + 3 * 0.1 * 1 + 4 * -0.2 * 2 = -0.8
    assert ActionSampler(head)(outputs.numpy(), noise).item() == pytest.approx(-0.8)
    assert ActionSampler(head)(outputs.numpy(), None).item() == 0.5


def test_state_dependent_samples_follow_their_distribution():
    head, generator = StateDependentHead(2, 5, -0.3, None), torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 7, generator=generator)
    drawn = ActionSampler(head)(outputs.expand(100_000, 7).numpy(), head.noise((100_000,), generator).numpy())
    variance = outputs[0, 2:].square().sum() * math.exp(-0.6)
    np.testing.assert_allclose(drawn.mean(0), outputs[0, :2].numpy(), atol=0.03)
    np.testing.assert_allclose(drawn.var(0), [float(variance)] * 2, rtol=0.02)


def test_state_dependent_noise_is_kept():
    def noise(held):
        return StateDependentHead(2, 3, 0.0, held).noise((2, 7, 4), torch.Generator().manual_seed(0))

    whole, threes = noise(None), noise(3)
    assert whole.shape == threes.shape == (2, 7, 4, 6)
    assert torch.equal(whole, whole[:, :1].expand_as(whole))
    assert [bool((threes[:, t] == threes[:, t - 1]).all()) for t in range(1, 7)] == [True, True, False] * 2
    assert len({tuple(row.tolist()) for row in whole[:, 0].flatten(0, 1)}) == 8  # others elsewhere, and in other epochs
