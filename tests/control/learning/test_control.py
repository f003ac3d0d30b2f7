"""The control update: its gradients are autograd's, its optimizer is torch's, and it stops where it should."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.control.learning.flat_learner import flat_learner
from tether.algorithms import POLICY_LOSSES, TOKEN_SELECTIONS, value_loss
from tether.control.learning.flat import FlatAdamW, FlatParameters
from tether.control.learning.losses import ControlLoss, Samples
from tether.control.policies.mlp_policy import ControlPolicy, PolicySpec
from tether.loop.engine import OptimizerOptions, UpdatePlan

OPTIONS = OptimizerOptions(lr=1e-2, weight_decay=0.0, eps=1e-5)
SPECS = {
    "gaussian": PolicySpec(5, None, 3, hidden_dim=8, num_layers=2),
    "discrete": PolicySpec(5, (4,), 1, hidden_dim=8, num_layers=1, activation="relu"),
    "multi-discrete": PolicySpec(5, (2, 3), 2, hidden_dim=8, num_layers=3, activation="elu"),
}


def make_policy(spec):
    """In float64, and away from its first weights, where the outputs are all but zero."""
    torch.manual_seed(0)
    policy = ControlPolicy(spec, seed=0).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return policy


def make_samples(policy, level="action_level", count=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    spec = policy.spec
    obs = torch.randn(count, spec.obs_dim, dtype=torch.float64, generator=generator)
    if spec.choices:
        columns = [torch.randint(0, n, (count, 1), generator=generator) for n in spec.choices]
        actions = torch.cat(columns, dim=1)
    else:
        actions = torch.randn(count, spec.action_width, dtype=torch.float64, generator=generator)
    width = spec.action_width if level == "token_level" else 1
    log_probs = policy.head.evaluate(policy.actor(obs), actions).log_probs.detach()
    log_probs = log_probs if level == "token_level" else log_probs.sum(dim=1, keepdim=True)
    noise, advantages = torch.randn(2, count, width, dtype=torch.float64, generator=generator)
    values, returns = torch.randn(2, count, 1, dtype=torch.float64, generator=generator)
    return Samples(obs, actions, log_probs + 0.3 * noise, advantages, values, returns)


@pytest.mark.parametrize("level", ["action_level", "token_level"])
@pytest.mark.parametrize("kind", SPECS)
def test_gradients_are_those_of_autograd(kind, level):
    policy = make_policy(SPECS[kind])
    samples = make_samples(policy, level)
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0}
    loss = ControlLoss(
        "vanilla",
        clips,
        entropy_coeff=0.05,
        value_coeff=0.5,
        cliprange_value=0.4,
        huber_delta=0.8,
        logprob_level=level,
        entropy_level=level,
    )
    learner = flat_learner(policy, loss, UpdatePlan(32, 1, shuffle=True), OPTIONS, critic_lr=1e-2)
    learner.engine.gradients(samples, loss)
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}

    columns = policy.head.evaluate(policy.actor(samples.obs), samples.actions)
    log_probs, entropy = columns.log_probs, columns.entropy
    if level == "action_level":
        log_probs, entropy = log_probs.sum(1, keepdim=True), entropy.sum(1, keepdim=True)
    values = policy.critic(samples.obs)
    actor = POLICY_LOSSES["vanilla"](
        log_probs, samples.old_log_probs, samples.advantages, torch.ones_like(log_probs), **clips
    )
    critic = value_loss(
        values, samples.values, samples.returns, torch.ones_like(values), cliprange_value=0.4, huber_delta=0.8
    )
    total = actor.loss.mean() - 0.05 * entropy.mean() + 0.5 * critic.loss.mean()
    expected = torch.autograd.grad(total, list(policy.parameters()))
    for (name, gradient), other in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12, msg=name)


def test_critic_warmup_moves_only_the_critic():
    policy = make_policy(SPECS["gaussian"])
    learner = flat_learner(policy, ControlLoss(), UpdatePlan(8, 2, shuffle=True), OPTIONS, critic_lr=1e-2)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    learner.update(make_samples(policy), 0, critic_only=True)
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("critic.")}


def test_metrics_of_an_unmoved_policy():
    policy = make_policy(SPECS["discrete"])
    samples = make_samples(policy)
    with torch.no_grad():
        exact = policy.head.evaluate(policy.actor(samples.obs), samples.actions).log_probs
    samples = Samples(samples.obs, samples.actions, exact, samples.advantages, samples.values, samples.returns)
    options = OptimizerOptions(lr=0.0)
    still = flat_learner(policy, ControlLoss(), UpdatePlan(8, 1), options, critic_lr=0.0)
    metrics = still.update(samples, 0).metrics
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/pg_loss"] == pytest.approx(-samples.advantages.mean().item())


def test_target_kl_ends_the_passes():
    plan = UpdatePlan(8, 50, shuffle=True, target_kl=1e-3)
    policy = make_policy(SPECS["discrete"])
    metrics = flat_learner(policy, ControlLoss(), plan, OPTIONS, 1e-2).update(make_samples(policy), 0).metrics
    assert 1 <= metrics["actor/epochs"] < 50


def test_a_gradient_that_is_not_finite_moves_nothing():
    policy = make_policy(SPECS["gaussian"])
    samples = make_samples(policy, count=8)
    samples.returns[3] = torch.nan
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    learner = flat_learner(policy, ControlLoss(), UpdatePlan(8, 1, shuffle=True), OPTIONS, 1e-2)
    metrics = learner.update(samples, 0).metrics
    assert metrics["actor/skipped_updates"] == 1
    assert math.isnan(metrics["actor/grad_norm"]), "0 would say that the optimizer made a step without a gradient"
    assert all(torch.equal(now, then) for now, then in zip(policy.parameters(), before, strict=True))


def test_each_pass_shuffles_again():
    policy = make_policy(SPECS["discrete"])
    samples, plan = make_samples(policy), UpdatePlan(8, shuffle=True)
    first, second = (samples[plan.order(len(samples), 3, epoch)] for epoch in (0, 1))
    assert not torch.equal(first.obs, second.obs)
    assert torch.equal(first.obs.sort(0).values, second.obs.sort(0).values)
    assert [len(piece) for piece in samples.split(12)] == [12, 12, 8]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_flat_adamw_is_that_of_torch(weight_decay):
    torch.manual_seed(0)
    ours, theirs = ([nn.Linear(4, 3).double(), nn.Linear(3, 2).double()] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        other.load_state_dict(mine.state_dict())
    flat = FlatParameters([list(layer.parameters()) for layer in ours])
    mine = FlatAdamW(flat, betas=(0.9, 0.99), eps=1e-5, weight_decay=weight_decay)
    rates = [1e-2, 3e-3]
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(theirs, rates, strict=True)]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-5, weight_decay=weight_decay)
    for _ in range(5):
        for ours_layer, their_layer in zip(ours, theirs, strict=True):
            for a, b in zip(ours_layer.parameters(), their_layer.parameters(), strict=True):
                b.grad = torch.randn_like(b)
                a.grad.copy_(b.grad)
        parameters = [p for layer in theirs for p in layer.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert mine.clip_(1.0) == pytest.approx(norm.item())
        reference.step()
        mine.step(rates)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-10, atol=1e-12)
    assert [piece.stop - piece.start for piece in flat.slices] == [15, 8]
    assert all(left.stop == right.start for left, right in pairwise(flat.slices))


CHUNKED = {
    "gaussian": PolicySpec(5, None, 2, num_action_chunks=3, value_width=3, hidden_dim=8, num_layers=2),
    "discrete": PolicySpec(
        5, (2, 3), 2, num_action_chunks=3, value_width=1, hidden_dim=8, num_layers=2, critic_num_layers=1,
    ),
    "shared": PolicySpec(5, None, 2, 3, 3, share_critic=True, hidden_dim=8, num_layers=2, activation="elu"),
}  # fmt: skip
LEVELS = {"token_level": (3, 2), "action_level": (3,), "chunk_level": ()}


def chunked_samples(policy, level, count=16):
    """Three actions a row, of which the last ones were not carried out in some rows, and NaN stands there."""
    generator = torch.Generator().manual_seed(2)
    spec = policy.spec
    obs = torch.randn(count, spec.obs_dim, dtype=torch.float64, generator=generator)
    carried_out = torch.arange(3) < torch.randint(1, 4, (count, 1), generator=generator)
    if spec.choices:
        actions = torch.cat([torch.randint(0, n, (count, 1), generator=generator) for n in spec.choices * 3], dim=1)
    else:
        actions = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    shape = (count, *LEVELS[level])
    with torch.no_grad():
        columns = policy.head.evaluate(policy.actor(obs), actions).log_probs.view(count, 3, 2)
        live = torch.where(carried_out[..., None], columns, 0)
        old = {"token_level": live, "action_level": live.sum(-1), "chunk_level": live.sum((1, 2))}[level]
    old = (old + 0.3 * torch.randn(shape, dtype=torch.float64, generator=generator)).reshape(count, -1)
    advantages = torch.randn(shape, dtype=torch.float64, generator=generator).reshape(count, -1)
    values, returns = torch.randn(2, count, spec.value_width, dtype=torch.float64, generator=generator)
    if spec.value_width == 3:
        returns = torch.where(carried_out, returns, torch.nan)
    if level != "chunk_level":
        dead = ~carried_out.repeat_interleave(old.shape[1] // 3, dim=1)
        old, advantages = old.masked_fill(dead, torch.nan), advantages.masked_fill(dead, torch.nan)
    weights = torch.rand(count, 1, dtype=torch.float64, generator=generator)
    return Samples(obs, actions, old, advantages, values, returns, carried_out, weights)


@pytest.mark.parametrize("aggregation", ["token-mean", "masked_mean_ratio"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", CHUNKED)
def test_gradients_of_chunks_are_those_of_autograd(kind, level, aggregation):
    policy = make_policy(CHUNKED[kind])
    samples = chunked_samples(policy, level)
    loss = ControlLoss(
        "vanilla", {"clip_ratio_c": 2.0}, aggregation=aggregation, entropy_coeff=0.05, value_coeff=0.5,
        cliprange_value=0.4, logprob_level=level, entropy_level=level,
    )  # fmt: skip
    learner = flat_learner(policy, loss, UpdatePlan(32, 1, shuffle=True), OPTIONS, critic_lr=1e-2)
    learner.engine.gradients(samples, loss)
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}

    mask = samples.mask
    hidden = policy.actor.activations(samples.obs)
    done = policy.head.evaluate(hidden[-1], samples.actions)
    live = mask[..., None].expand(-1, 3, 2)

    def reduce(columns):
        columns = torch.where(live, columns.view(-1, 3, 2), 0)
        kept = {"token_level": columns, "action_level": columns.sum(-1), "chunk_level": columns.sum((1, 2))}[level]
        return kept.reshape(len(samples), -1)

    counted = {"token_level": live.reshape(-1, 6), "action_level": mask, "chunk_level": mask[:, :1]}[level]
    values = policy.critic(hidden[-2] if policy.spec.share_critic else samples.obs)
    value_mask = mask if policy.spec.value_width == 3 else mask[:, :1]
    actor = POLICY_LOSSES["vanilla"](
        reduce(done.log_probs), samples.old_log_probs, samples.advantages, counted, clip_ratio_c=2.0
    )
    critic = value_loss(values, samples.values, samples.returns, value_mask, cliprange_value=0.4)

    def mean(loss, mask):
        if aggregation == "token-mean":
            return loss[mask].mean()
        return (samples.weights * loss)[mask].sum() / loss.numel()

    entropy = reduce(done.entropy)[counted].mean()
    total = mean(actor.loss, counted) - 0.05 * entropy + 0.5 * mean(critic.loss, value_mask)
    expected = torch.autograd.grad(total, list(policy.parameters()))
    for (name, gradient), other in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12, msg=name)
    metrics = learner.update(samples, 0).metrics
    assert all(value == value for value in metrics.values())
    assert metrics["actor/skipped_updates"] == 0


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "bypass_mode"])
def test_every_policy_loss_trains(name):
    policy = make_policy(CHUNKED["gaussian"])
    selection = {"clip_cov_lb": -10.0, "clip_cov_ub": 10.0, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2}
    loss = ControlLoss(name, selection=selection if name in TOKEN_SELECTIONS else {})
    before = policy.actor.linear[0][0].clone()
    learner = flat_learner(policy, loss, UpdatePlan(8, 2, shuffle=True), OPTIONS, 1e-2)
    metrics = learner.update(chunked_samples(policy, "action_level"), 0).metrics
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["actor/pg_loss"] == metrics["actor/pg_loss"]
    assert not torch.equal(policy.actor.linear[0][0], before)


def test_decoupled_on_what_was_just_sampled_is_vanilla():
    moved = []
    for name in ("vanilla", "decoupled"):
        policy = make_policy(SPECS["gaussian"])
        loss = ControlLoss(name, {"clip_ratio_c": 3.0})
        learner = flat_learner(policy, loss, UpdatePlan(8, 2, shuffle=True), OPTIONS, 1e-2)
        learner.update(make_samples(policy), 0)
        moved.append([parameter.detach().clone() for parameter in policy.parameters()])
    for left, right in zip(*moved, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10)


def test_warmup_of_a_shared_critic_moves_only_its_layer():
    policy = make_policy(CHUNKED["shared"])
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    learner = flat_learner(policy, ControlLoss(), UpdatePlan(8, 2, shuffle=True), OPTIONS, critic_lr=1e-2)
    learner.update(chunked_samples(policy, "action_level"), 0, critic_only=True)
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"critic.layers.0.weight", "critic.layers.0.bias"}


def test_the_kl_leads_the_learning_rate():
    policy = make_policy(SPECS["discrete"])
    plan = UpdatePlan(8, 4, shuffle=True, target_kl=1e-6, adapts_lr=True)
    learner = flat_learner(policy, ControlLoss(), plan, OPTIONS, 1e-2)
    metrics = learner.update(make_samples(policy), 0).metrics
    assert metrics["actor/epochs"] == 4
    assert metrics["actor/lr"] == pytest.approx(1e-2 / 1.5**4)
    again = flat_learner(policy, ControlLoss(), plan, OPTIONS, 1e-2)
    again.engine.load_state_dict(learner.engine.state_dict())
    assert again.engine._rates(0) == learner.engine._rates(0)
    far = flat_learner(
        policy, ControlLoss(), UpdatePlan(8, 1, shuffle=True, target_kl=1e6, adapts_lr=True), OPTIONS, 1e-2
    )
    assert far.update(make_samples(policy), 0).metrics["actor/lr"] == pytest.approx(1.5e-2)


def test_nothing_to_learn_from_is_no_update():
    policy = make_policy(SPECS["discrete"])
    learner = flat_learner(policy, ControlLoss(), UpdatePlan(8, 2, shuffle=True), OPTIONS, 1e-2)
    nothing = next(make_samples(policy).split(1)).each(lambda column: column[:0])
    assert learner.update(nothing, 0).metrics["actor/epochs"] == 0
