"""The update of policies with a CNN or an LSTM: gradients, micro-batches, what is masked, what is shared."""

import dataclasses

import pytest
import torch
from tensordict import TensorDict

from tests.control.learning.flat_learner import flat_learner
from tether.algorithms import POLICY_LOSSES, TOKEN_SELECTIONS, value_loss
from tether.control.learning.losses import ControlLoss, Samples
from tether.control.policies.mlp_policy import make_policy
from tether.control.policies.spec import NUMBERS, PICTURE, Memory, PolicySpec, with_numbers
from tether.loop.engine import OptimizerOptions, UpdatePlan
from tether.observations import ObsPart

OPTIONS = OptimizerOptions(lr=1e-2, weight_decay=0.0, eps=1e-5)
SMALL = {"hidden_dim": 6, "num_layers": 1, "activation": "tanh"}
LAYOUT = (ObsPart("image", "image", (3, 3, 2), "uint8"), ObsPart("hand", "vector", (2,)))
PICTURED = {"layout": LAYOUT, "pictures": ("image",)}
SPECS = {
    "cnn": PolicySpec(2, None, 2, **SMALL, **PICTURED, share_critic=True),
    "two cnns": PolicySpec(2, (3,), 1, **SMALL, **PICTURED),
    "lstm": PolicySpec(5, (3, 2), 2, **SMALL, lstm_dim=4, share_critic=True),
    "two lstms of chunks": PolicySpec(5, None, 1, 2, 2, **SMALL, lstm_dim=4, critic_hidden_dim=5),
    "cnn and lstm": PolicySpec(2, (4,), 1, **SMALL, **PICTURED, lstm_dim=4),
    "noise by state": PolicySpec(5, None, 2, **SMALL, use_sde=True, share_critic=True),
    "noise by memory": PolicySpec(5, None, 1, 2, 2, **SMALL, use_sde=True, lstm_dim=4),
}
SEQUENCES, DECISIONS = 6, 4


def make(name):
    """In float64, and away from its first weights, where the outputs are all but zero."""
    policy = make_policy(SPECS[name], seed=0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return policy


def random_samples(policy, off=0.3):
    """24 decisions, in 6 sequences where there is a memory, of which some are not kept."""
    generator, spec = torch.Generator().manual_seed(1), policy.spec
    shape = (SEQUENCES, DECISIONS) if policy.state_width else (SEQUENCES * DECISIONS,)
    draw = {"dtype": torch.float64, "generator": generator}
    numbers = torch.randn(*shape, spec.obs_dim, **draw)
    obs = numbers
    if policy.pictures is not None:
        picture = torch.randint(0, 256, (*shape, 2, 3, 3), dtype=torch.uint8, generator=generator)
        obs = TensorDict({NUMBERS: numbers, PICTURE: picture}, batch_size=shape)
    if spec.choices:
        actions = torch.stack([torch.randint(0, n, shape, generator=generator) for n in spec.choices], dim=-1)
    else:
        actions = torch.randn(*shape, policy.head.width, **draw)
    memory = None
    if policy.state_width:
        starts, kept = (torch.rand(shape, generator=generator) < share for share in (0.3, 0.7))
        memory = Memory(starts, torch.randn(SEQUENCES, policy.state_width, **draw), kept)
    width = spec.num_action_chunks
    mask = torch.arange(width) < torch.randint(1, width + 1, (*shape, 1), generator=generator) if width > 1 else None
    values, returns = torch.randn(2, *shape, spec.value_width, **draw)
    noise, advantages = torch.randn(2, *shape, width, **draw)
    weights = torch.rand(*shape, 1, **draw)
    samples = Samples(obs, actions, noise, advantages, values, returns, mask, weights, memory)
    with torch.no_grad():
        columns = columns_of(policy, samples)[0].reshape(*shape, -1)
    old = columns if width > 1 else columns.sum(dim=-1, keepdim=True)
    return dataclasses.replace(samples, old_log_probs=old + off * noise)


def columns_of(policy, samples):
    """Log-probabilities and entropies of all columns of all decisions, [S, K * D], and values, [S, V]."""
    if samples.memory is None:
        outputs, values = policy(samples.obs, None, torch.zeros(len(samples), 0))
    else:
        outputs, values = policy(samples.obs, samples.memory.starts, samples.memory.state)
    done = policy.head.evaluate(outputs.reshape(-1, outputs.shape[-1]), samples.actions.flatten(0, -2))
    return done.log_probs, done.entropy, values.flatten(0, -2)


def gradients(policy, samples, loss, micro_batch=None, train_policy=True):
    learner = flat_learner(policy, loss, UpdatePlan(24, 1, shuffle=True), OPTIONS, critic_lr=1e-2)
    learner.engine._flat.grads.fill_(torch.nan)  # what is there does not count
    policy.micro_batch = micro_batch
    function = (learner.loss if train_policy else learner.critic_loss).function
    learner.engine.gradients(samples, function, lambda: torch.Generator().manual_seed(3))
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


LOSS = ControlLoss("vanilla", {"clip_ratio_c": 2.0}, entropy_coeff=0.05, value_coeff=0.5, cliprange_value=0.4)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_autograd(name):
    policy = make(name)
    samples = random_samples(policy)
    found = gradients(policy, samples, LOSS)
    kept = torch.ones(24, dtype=torch.bool) if samples.memory is None else samples.memory.selected.flatten()
    columns, entropies, values = columns_of(policy, samples)
    chunk = policy.spec.num_action_chunks
    live = torch.ones(24, chunk, dtype=torch.bool) if samples.mask is None else samples.mask.flatten(0, -2)
    live = live & kept[:, None]
    log_probs, entropy = ((part.unflatten(1, (chunk, -1)).sum(-1)) for part in (columns, entropies))
    rows = {key: getattr(samples, key).flatten(0, -2) for key in ("old_log_probs", "advantages", "values", "returns")}
    actor = POLICY_LOSSES["vanilla"](log_probs, rows["old_log_probs"], rows["advantages"], live, clip_ratio_c=2.0)
    critic = value_loss(values, rows["values"], rows["returns"], live, cliprange_value=0.4)
    total = actor.loss[live].mean() - 0.05 * entropy[live].mean() + 0.5 * critic.loss[live].mean()
    expected = torch.autograd.grad(total, list(policy.parameters()))
    for (parameter, gradient), other in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12, msg=parameter)


@pytest.mark.parametrize(
    ("name", "loss_name"),
    [
        *(("two lstms of chunks", loss) for loss in POLICY_LOSSES if loss != "bypass_mode"),
        *((name, loss) for name in ("cnn", "lstm") for loss in ("vanilla", "clip_cov")),
    ],
)
def test_micro_batches_change_no_gradient(name, loss_name):
    policy = make(name)
    samples = random_samples(policy)
    selection = {"clip_cov_lb": -10.0, "clip_cov_ub": 10.0, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2}
    loss = ControlLoss(
        loss_name, selection=selection if loss_name in TOKEN_SELECTIONS else {}, aggregation="masked_mean_ratio",
        entropy_coeff=0.05, cliprange_value=0.4, huber_delta=0.5,
    )  # fmt: skip
    whole = gradients(policy, samples, loss)
    assert all(float(gradient.abs().max()) > 0 for gradient in whole.values())
    for size in (4, 16):
        for parameter, gradient in gradients(policy, samples, loss, size).items():
            torch.testing.assert_close(gradient, whole[parameter], rtol=1e-10, atol=1e-14, msg=parameter)


@pytest.mark.parametrize("name", ["lstm", "two lstms of chunks", "cnn and lstm"])
def test_decisions_that_are_not_kept_change_no_bit(name):
    policy = make(name)
    samples = random_samples(policy)
    expected = gradients(policy, samples, LOSS)
    lost = ~samples.memory.selected[..., None]
    poisoned = {
        key: getattr(samples, key).masked_fill(lost, torch.nan)
        for key in ("old_log_probs", "advantages", "values", "returns", "weights")
    }
    found = gradients(policy, dataclasses.replace(samples, **poisoned), LOSS)
    assert all(torch.equal(found[parameter], expected[parameter]) for parameter in expected)


@pytest.mark.parametrize("name", SPECS)
def test_a_critic_that_is_trained_alone_moves_nothing_else(name):
    policy = make(name)
    found = gradients(policy, random_samples(policy), LOSS, train_policy=False)
    assert {key for key, gradient in found.items() if gradient.any()} == {key for key in found if "critic" in key}


@pytest.mark.parametrize("name", SPECS)
def test_metrics_of_an_unmoved_policy(name):
    policy = make(name)
    samples = random_samples(policy, off=0.0)
    still = flat_learner(policy, ControlLoss(), UpdatePlan(8, 2, shuffle=True), OptimizerOptions(lr=0.0), critic_lr=0.0)
    metrics = still.update(samples, 0).metrics
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["actor/ratio_min"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["actor/epochs"] == 2
    with torch.no_grad():
        assert still.engine._kl(samples, ControlLoss()) == pytest.approx(0.0, abs=1e-12)


def test_sequences_stay_whole():
    policy = make("cnn and lstm")
    samples = random_samples(policy)
    pieces = list(samples[UpdatePlan(8, shuffle=True).order(len(samples), 0, 0)].split(8))
    assert [len(piece) for piece in pieces] == [2, 2, 2]
    order = [samples.memory.state.tolist().index(row) for piece in pieces for row in piece.memory.state.tolist()]
    assert sorted(order) == list(range(6)) != order
    first = pieces[0]
    assert torch.equal(first.obs[PICTURE], samples.obs[PICTURE][order[:2]])
    rows = first.decisions()
    assert rows.memory is None
    assert torch.equal(rows.advantages, samples.advantages[order[:2]][samples.memory.selected[order[:2]]])


def test_numbers_are_changed_beside_a_picture():
    samples = random_samples(make("cnn"))
    changed = with_numbers(samples.obs, samples.obs[NUMBERS] + 1)
    assert torch.equal(changed[NUMBERS], samples.obs[NUMBERS] + 1)
    assert changed[PICTURE].data_ptr() == samples.obs[PICTURE].data_ptr()
