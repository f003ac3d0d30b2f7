"""Control policies: their distributions, how they act, what they see, and that a file gives them back unchanged."""

import json

import numpy as np
import pytest
import torch

from tether.control.policies.mlp_policy import ControlPolicy, PolicySpec, load_policy, save_policy
from tether.control.policies.networks import ACTIVATIONS, CategoricalHead, GaussianHead, Mlp, RunningNormalizer
from tether.observations import ObsPart

SPECS = [
    PolicySpec(4, None, 2, hidden_dim=8, num_layers=2, normalize_observations=True, activation="elu"),
    PolicySpec(4, (3,), 1, hidden_dim=8, num_layers=1),
    PolicySpec(4, (3, 2), 2, hidden_dim=8, num_layers=3, activation="relu", critic_hidden_dim=5, critic_num_layers=1),
]


def make(spec, seed=0):
    policy = ControlPolicy(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if policy.normalizer:
        policy.normalizer.update(3 + 2 * torch.randn(100, spec.obs_dim, generator=generator))
    return policy


@pytest.mark.parametrize("spec", SPECS)
def test_acting_is_what_the_networks_say(spec):
    policy, generator = make(spec), torch.Generator().manual_seed(1)
    obs = 3 * torch.randn(50, spec.obs_dim, generator=generator)
    noise = policy.head.noise((50,), generator)
    with torch.no_grad():
        outputs = policy.actor(policy.inputs({"state": obs}))
    actor = policy.acting()
    nothing = np.zeros((50, 0), dtype=np.float32)
    if spec.choices is None:
        expected = outputs + noise * policy.head.logstd.exp()
        torch.testing.assert_close(
            torch.from_numpy(actor({"state": obs.numpy()}, noise.numpy(), nothing)[0]), expected.detach()
        )
        torch.testing.assert_close(torch.from_numpy(actor({"state": obs.numpy()}, None, nothing)[0]), outputs)
    else:
        for scores, given in ((outputs + noise, noise.numpy()), (outputs, None)):
            expected = torch.stack([part.argmax(1) for part in scores.split(spec.choices, 1)], 1)
            assert actor({"state": obs.numpy()}, given, nothing)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_forward_pass_in_numpy_is_that_in_torch(activation):
    net = Mlp([3, 4, 4, 2], activation, 1.0, torch.Generator().manual_seed(0))
    normalizer = RunningNormalizer(3, clip=1.0)
    x = 5 * torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    normalizer.update(x[:5])
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(net.in_numpy()(x.numpy())), net(x))
        by_hand = ACTIVATIONS[activation].apply_array(x.numpy())
        torch.testing.assert_close(torch.from_numpy(by_hand), ACTIVATIONS[activation].apply(x))
    torch.testing.assert_close(torch.from_numpy(normalizer.in_numpy()(x.numpy())), normalizer(x))


def test_samples_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    head = CategoricalHead((3,))
    noise = head.noise((200_000,), torch.Generator().manual_seed(0))
    counts = torch.bincount((logits + noise).argmax(1), minlength=3) / 200_000
    torch.testing.assert_close(counts, logits.softmax(1)[0], atol=0.005, rtol=0)


def test_distributions_are_those_of_torch():
    outputs, generator = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    actions = torch.cat([torch.randint(0, 3, (6, 1), generator=generator), torch.randint(0, 2, (6, 1))], 1)
    done = CategoricalHead((3, 2)).evaluate(outputs, actions)
    for column, part in enumerate(outputs.split((3, 2), 1)):
        theirs = torch.distributions.Categorical(logits=part)
        torch.testing.assert_close(done.log_probs[:, column], theirs.log_prob(actions[:, column]))
        torch.testing.assert_close(done.entropy[:, column], theirs.entropy())
    head = GaussianHead(5, -0.3)
    moves = torch.randn(6, 5, generator=generator)
    done, theirs = head.evaluate(outputs, moves), torch.distributions.Normal(outputs, head.logstd.exp())
    torch.testing.assert_close(done.log_probs, theirs.log_prob(moves))
    torch.testing.assert_close(done.entropy, theirs.entropy())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_by_hand_is_autograd(activation):
    net = Mlp([3, 4, 4, 2], activation, 1.0, torch.Generator().manual_seed(0)).double()
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out_grad = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(net(x), list(net.parameters()), out_grad)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with torch.no_grad():
        net.backward(net.activations(x), out_grad)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_first_weights():
    net = ControlPolicy(PolicySpec(4, (2,), 1), seed=0)
    weight = net.actor.layers[1].weight
    torch.testing.assert_close(weight @ weight.t(), 2 * torch.eye(256), atol=1e-4, rtol=0)
    assert net.actor(torch.randn(5, 4)).abs().max() < 0.1
    assert ControlPolicy(PolicySpec(4, None, 3), seed=0).head.logstd.tolist() == [-0.5] * 3


def test_parts_that_are_not_normalised_stay_as_they_are():
    layout = (ObsPart("speed", "vector", (2,)), ObsPart("goal", "vector", (1,)))
    spec = PolicySpec(3, None, 2, layout=layout, normalize_observations=True, normalize_only=("speed",))
    normalizer = spec.make_normalizer()
    normalizer.update(torch.tensor([[0.0, 10.0, 100.0], [2.0, 30.0, 900.0]]))
    x = torch.tensor([[3.0, 20.0, 700.0]])
    torch.testing.assert_close(normalizer(x), torch.tensor([[2.0, 0.0, 700.0]]))
    torch.testing.assert_close(torch.from_numpy(normalizer.in_numpy()(x.numpy())), normalizer(x))


def test_pictures_alone_leave_nothing_to_normalise():
    layout = (ObsPart("image", "image", (8, 8, 3), "uint8"),)
    spec = PolicySpec(0, (5,), 1, layout=layout, pictures=("image",), normalize_observations=True)
    normalizer = spec.make_normalizer()
    normalizer.update(torch.empty(4, 0))
    assert normalizer(torch.empty(2, 0)).shape == (2, 0)


def test_running_statistics_are_those_of_everything_seen():
    generator = torch.Generator().manual_seed(0)
    pieces = [5 + 3 * torch.randn(n, 2, generator=generator) for n in (4, 100, 1)]
    normalizer = RunningNormalizer(2, clip=10.0)
    untouched = torch.tensor([[1.0, -20.0]])
    assert normalizer(untouched).tolist() == [[1.0, -10.0]]
    for piece in pieces:
        normalizer.update(piece)
    everything = torch.cat(pieces).double()
    torch.testing.assert_close(normalizer.mean, everything.mean(0))
    torch.testing.assert_close(normalizer.var, everything.var(0, unbiased=False))
    scaled = normalizer(torch.cat(pieces))
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), atol=1e-5, rtol=0)


def test_a_critic_has_sizes_of_its_own():
    sizes = [layer.weight.shape for layer in make(SPECS[2]).critic.layers]
    assert sizes == [(5, 4), (1, 5)]
    assert [layer.weight.shape for layer in make(SPECS[2]).actor.layers] == [(8, 4), (8, 8), (8, 8), (5, 8)]


@pytest.mark.parametrize("spec", SPECS)
def test_saved_and_loaded(spec, tmp_path):
    policy = make(spec)
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.spec == spec
    obs = torch.randn(9, spec.obs_dim)
    assert torch.equal(loaded.values(obs), policy.values(obs))
    actions = [each.acting()({"state": obs.numpy()}, None, np.zeros((9, 0)))[0] for each in (loaded, policy)]
    assert np.array_equal(*actions)


def test_a_policy_that_was_saved_before_observations_had_parts(tmp_path):
    """Perceptrons read one row of numbers as they did then; which part was a picture is not known."""
    policy, spec = make(SPECS[0]), SPECS[0]
    save_policy(policy, tmp_path / "policy")
    file = tmp_path / "policy/policy.json"
    fields = json.loads(file.read_text())
    del fields["layout"]
    file.write_text(json.dumps(fields))
    obs = torch.randn(9, spec.obs_dim)
    assert torch.equal(load_policy(tmp_path / "policy").values(obs), policy.values(obs))
    file.write_text(json.dumps({**fields, "pictures": [[0, 7, 7, 3]]}))
    with pytest.raises(ValueError, match=r"policy\.json: does not name the fields of its obs.*train the policy again"):
        load_policy(tmp_path / "policy")


def test_no_policy_there(tmp_path):
    with pytest.raises(ValueError, match=r"no control policy here"):
        load_policy(tmp_path)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(broken, tmp_path):
    policy = make(SPECS[0])
    with torch.no_grad():
        policy.critic.layers[1].bias[3] = broken
    save_policy(policy, tmp_path / "policy")
    with pytest.raises(
        ValueError, match=r"policy\.safetensors: 1 weights hold NaN or infinity.* critic\.layers\.1\.bias"
    ):
        load_policy(tmp_path / "policy")
