"""A flow-matching policy as it is trained, over a small backbone; over lerobot's: `test_lerobot.py`."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.control.learning.flat_learner import flat_learner
from tests.integrations.robots.flow.fake import FakeBackbone
from tests.integrations.robots.flow.test_chain import METHODS, spec
from tether.control.learning.losses import ControlLoss, Samples
from tether.control.policies.mlp_policy import load_policy, save_policy
from tether.integrations.robots.flow import backbone
from tether.integrations.robots.flow.chain import Record, log_density, step
from tether.integrations.robots.flow.policy import FlowPolicy
from tether.integrations.robots.flow.prompts import FlowPrompts, task_and_state_prompt, task_prompt
from tether.loop.engine import OptimizerOptions, UpdatePlan
from tether.observations import ObsPart, decode_text, encode_text

LAYOUT = (ObsPart("hand", "vector", (3,)), ObsPart("task", "text", (5,), "uint8"))
KINDS = [(joint, method) for joint in (False, True) for method in METHODS]


@pytest.fixture(autouse=True)
def _without_lerobot(monkeypatch):
    monkeypatch.setattr(backbone, "make_backbone", FakeBackbone)


def make(joint=False, method="flow_sde", seed=0, **changes):
    fields = {"layout": LAYOUT, "state_dim": 4, "prompt_length": 7, "value_width": 2, **changes}
    shape = spec(**fields, joint_logprob=joint, noise_method=method)
    return FlowPolicy(shape, seed).double()


def shown(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    words = torch.stack([torch.from_numpy(encode_text(word, 5).copy()) for word in ("left", "up", "right")])
    which = torch.randint(0, 3, shape, generator=generator)
    return {"hand": torch.randn(*shape, 3, generator=generator, dtype=torch.float64), "task": words[which]}


def noise_of(policy, *shape, seed=3):
    return policy.head.noise(shape, torch.Generator().manual_seed(seed)).double()


def decisions(policy, count, seed=3):
    obs = policy.inputs(shown(count))
    return obs, policy.act(obs, noise_of(policy, count, seed=seed))


@pytest.mark.parametrize(("joint", "method"), KINDS)
def test_what_is_said_of_a_rollout_is_what_is_trained_on(joint, method):
    policy = make(joint, method)
    obs, final = policy.inputs(shown(3, 4)), policy.inputs(shown(2, seed=5))
    noise = noise_of(policy, 3, 3)
    actions = torch.stack([policy.act(obs[:, c], noise[c]) for c in range(3)], dim=1)
    at = (torch.tensor([1, 1]), torch.tensor([0, 2]))
    said = policy.review(obs, torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 0), final, at, actions)
    rows, chosen = obs[:, :-1].flatten(0, 1), actions.flatten(0, 1)
    passed = policy.run(rows, None, chosen)
    torch.testing.assert_close(said.outputs.flatten(0, 1), passed.outputs)
    torch.testing.assert_close(said.values[:, :-1].flatten(0, 1), passed.values)
    torch.testing.assert_close(said.values[:, -1], policy.values(obs[:, -1]))
    torch.testing.assert_close(said.final_values, policy.values(final))
    torch.testing.assert_close(policy.outputs(rows, None, chosen), passed.outputs)
    assert passed.outputs.shape == (9, 2 * 4)


@pytest.mark.parametrize(("joint", "method"), KINDS)
def test_the_noise_that_was_drawn_is_in_the_log_probabilities(joint, method):
    """x = mean + std z has the log-density -z^2 / 2 - log(std) - log(2 pi) / 2, whatever the network is."""
    policy = make(joint, method)
    obs = policy.inputs(shown(6))
    noise = noise_of(policy, 6)
    actions = policy.act(obs, noise)
    record, drawn = Record.of_columns(actions, policy.spec), noise[:, 1:].unflatten(1, (-1, 3, 4))
    prefix, expected = policy.model.prefix(obs), 0.0
    for number, (index, before, after) in enumerate(record.steps(policy.spec)):
        velocity, learned = policy._velocity(prefix, before, index)
        mean, std = step(before, velocity, index, 5, method, 0.5, learned)
        z = drawn[:, 1 + number, :2, :2]
        torch.testing.assert_close(after, mean[:, :2, :2] + std[:, :2, :2] * z)
        expected = expected + log_density(after, mean[:, :2, :2], std[:, :2, :2])
        assert (std[:, :2, :2] > 0).all()
    torch.testing.assert_close(policy.log_probs(obs, actions), expected.flatten(1))


def test_the_random_step_is_drawn_for_each_decision():
    policy = make(num_steps=4)
    obs = policy.inputs(shown(400))
    record = Record.of_columns(policy.act(obs, noise_of(policy, 400)), policy.spec)
    counts = torch.bincount(record.index, minlength=4)
    assert (counts > 60).all()


def test_the_mean_over_steps_divides_the_sum():
    summed, meant = make(True), make(True, step_logprobs="mean")
    obs, actions = decisions(summed, 4)
    torch.testing.assert_close(meant.log_probs(obs, actions) * 6, summed.log_probs(obs, actions))


def test_without_noise_the_ode_is_followed_from_zero():
    policy = make()
    obs = policy.inputs(shown(3))
    x, prefix = torch.zeros(3, 3, 4, dtype=torch.float64), policy.model.prefix(obs)
    for number in range(5):
        x = x - policy.model.velocity(prefix, x, torch.full((3,), 1 - number / 5, dtype=torch.float64))[0] / 5
    taken = policy.act(obs, None).unflatten(1, (2, -1))[:, :, :2]
    torch.testing.assert_close(taken, x[:, :2, :2])


def test_samples_do_not_depend_on_the_batch():
    policy = make()
    obs, noise = policy.inputs(shown(6)), noise_of(policy, 6)
    alone = torch.cat([policy.act(obs[row : row + 1], noise[row : row + 1]) for row in range(6)])
    torch.testing.assert_close(alone, policy.act(obs, noise))


def samples(policy, count=12):
    generator = torch.Generator().manual_seed(7)
    obs, actions = decisions(policy, count)
    log_probs = policy.log_probs(obs, actions).detach().sum(dim=1, keepdim=True)
    noise, advantages = torch.randn(2, count, 1, dtype=torch.float64, generator=generator)
    values, returns = torch.randn(2, count, 2, dtype=torch.float64, generator=generator)
    mask = torch.rand(count, 2, generator=generator) > 0.3
    mask[:, 0] = True
    return Samples(obs, actions, log_probs + 0.1 * noise, advantages, values, returns, mask=mask)


def learner(policy):
    loss = ControlLoss("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, logprob_level="chunk_level",
                       entropy_level="token_level", entropy_coeff=0.01)  # fmt: skip
    return flat_learner(policy, loss, UpdatePlan(12, 1), OptimizerOptions(lr=1e-2), critic_lr=1e-2)


def gradients(policy):
    made = learner(policy)
    made.engine.gradients(samples(policy), made.loss.function)
    return {name: value.grad.clone() for name, value in policy.named_parameters()}


@pytest.mark.parametrize(("joint", "method"), KINDS)
def test_micro_batches_change_no_gradient(joint, method):
    whole, parts = make(joint, method), make(joint, method)
    parts.micro_batch = 5
    expected, found = gradients(whole), gradients(parts)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert any(gradient.any() for name, gradient in expected.items() if name.startswith("noise_head")) == (
        method == "flow_noise"
    )


def test_the_critics_gradient_can_be_kept_out_of_the_network():
    for detached in (False, True):
        policy = make(detach_critic_input=detached)
        learner(policy)
        obs, actions = decisions(policy, 3)
        passed = policy.run(obs, None, actions)
        policy.backward(passed, None, torch.ones_like(passed.values))
        assert policy.model.numbers.weight.grad.any() != detached
        assert policy.critic.layers[0].weight.grad.any()


@pytest.mark.parametrize(("joint", "method"), KINDS)
def test_an_update_makes_a_rewarded_chain_likelier(joint, method):
    policy = make(joint, method, value_width=0).float()
    obs, actions = decisions(policy.double(), 8)
    policy, obs, actions = policy.float(), floats(obs), actions.float()
    before = policy.log_probs(obs, actions).detach().sum(dim=1, keepdim=True)
    advantages = torch.tensor([[1.0]] * 4 + [[-1.0]] * 4)
    made = learner(policy)
    for _ in range(5):
        made.update(Samples(obs, actions, before, advantages), 0)
    change = policy.log_probs(obs, actions).detach().sum(dim=1, keepdim=True) - before
    assert change[:4].mean() > change[4:].mean() + 0.01


def floats(obs):
    return TensorDict({k: v.float() if v.dtype == torch.float64 else v for k, v in obs.items()}, obs.batch_size)


def test_imitation_is_of_the_scaled_actions_and_repeats_with_its_generator():
    policy = make()
    obs = policy.inputs(shown(5))
    actions = torch.randn(5, 3 * 2, dtype=torch.float64)
    first, again = (policy.imitation_losses(obs, actions, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == (5, 6)
    assert torch.equal(first, again)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(5, 3, 4, generator=generator).double()
    t = (0.999 * torch.rand(5, generator=generator) ** (2 / 3) + 0.001).double()
    scaled = (actions.unflatten(1, (3, 2)) - torch.tensor([0.0, 1.0])) / torch.tensor([1.0, 2.0])
    padded = torch.nn.functional.pad(scaled, (0, 2))
    expected = policy.model.matching_losses(obs, padded, noise, t)[:, :, :2]
    torch.testing.assert_close(first, expected.flatten(1))


@pytest.mark.parametrize("joint", [False, True])
def test_relative_actions_are_added_to_the_state_and_change_no_probability(joint):
    """The same chain, whose end is an action relative to the first number of the state."""
    scale = ((0.5, 0.0, 0.0), (2.0, 1.0, 1.0))
    relative, shift = make(joint, relative_actions=1, state_scale=scale), make(joint, state_scale=scale)
    seen = shown(6)
    obs = relative.inputs(seen)
    absolute, actions = (policy.act(obs, noise_of(policy, 6)) for policy in (shift, relative))
    carried_out = [policy.action_code().decode(found.unflatten(1, (2, -1)).numpy())
                   for policy, found in ((shift, absolute), (relative, actions))]  # fmt: skip
    moved = np.zeros((6, 2, 2))
    moved[..., 0] = seen["hand"][:, :1].numpy()  # both actions of a chunk
    np.testing.assert_allclose(carried_out[1] - carried_out[0], moved, atol=1e-5)
    torch.testing.assert_close(relative.log_probs(obs, actions), shift.log_probs(obs, absolute))


def test_relative_actions_are_imitated_relative_to_the_state():
    scale = ((0.5, 0.0, 0.0), (2.0, 1.0, 1.0))
    relative, absolute = make(relative_actions=1, state_scale=scale), make(state_scale=scale)
    seen = shown(5)
    obs, actions = relative.inputs(seen), torch.randn(5, 3, 2, dtype=torch.float64)
    differences = actions.clone()
    differences[:, :, 0] -= seen["hand"][:, :1]
    found, expected = (policy.imitation_losses(obs, target.flatten(1), torch.Generator().manual_seed(1))
                       for policy, target in ((relative, actions), (absolute, differences)))  # fmt: skip
    torch.testing.assert_close(found, expected)


def test_pi05_may_not_see_the_state():
    blind = make(model_type="pi05", discrete_state_input=False, prompt_length=40)
    sighted = make(model_type="pi05", prompt_length=40)
    seen = shown(2)
    for policy in (blind, sighted):
        changed = {**seen, "hand": seen["hand"] + 0.5}
        same = [policy.inputs(shown_)["tokens"].tolist() for shown_ in (seen, changed)]
        assert (same[0] == same[1]) == (policy is blind)
    ids, _ = FlowPrompts(40, None)([task_prompt(word) for word in map(decode_text, seen["task"].numpy())])
    assert blind.inputs(seen)["tokens"].tolist() == ids.tolist()


def test_files_give_a_policy_back(tmp_path):
    policy = make(method="flow_noise").float()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.spec == policy.spec
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), loaded.parameters(), strict=True))


def test_prompts_of_both_policies():
    assert task_prompt("lift it") == "lift it\n"
    state = torch.tensor([-1.0, 0.0, 0.999]).numpy()
    assert task_and_state_prompt("lift_it\n", state) == "Task: lift it, State: 0 128 255;\nAction: "
    ids, mask = FlowPrompts(4, None)(["ab", "abcdef"])
    assert ids.tolist() == [[2, 100, 101, 0], [2, 100, 101, 102]]  # 3 + the byte; what is too long is cut
    assert mask.sum(dim=1).tolist() == [3, 4]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"policy.tokenizer_path={tmp_path}"):
        FlowPrompts(4, str(tmp_path))


def test_without_lerobot_the_error_names_the_command(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "lerobot.policies.common.vla_utils", None)
    monkeypatch.setitem(__import__("sys").modules, "lerobot", None)
    with pytest.raises(ValueError, match="tether setup lerobot"):
        FlowPolicy(spec(), 0)
