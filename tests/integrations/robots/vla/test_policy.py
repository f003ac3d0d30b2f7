"""A vision-language-action policy as it is trained: what it says of a rollout, its gradients, LoRA, files."""

import pytest
import torch
from tensordict import TensorDict

from tests.control.learning.flat_learner import flat_learner
from tether.control.learning.flat import retry_with_smaller_micro_batches
from tether.control.learning.losses import ControlLoss, Samples
from tether.control.policies.mlp_policy import load_policy, save_policy
from tether.control.policies.spec import NUMBERS, PICTURE, TEXT
from tether.integrations.robots.vla.model import VlaModel
from tether.integrations.robots.vla.policy import VlaPolicy
from tether.integrations.robots.vla.spec import ACTION_BINS, VlaSpec
from tether.loop.engine import OptimizerOptions, UpdatePlan
from tether.observations import ObsPart

HAND, IMAGE = ObsPart("hand", "vector", (4,)), ObsPart("image", "image", (8, 8, 3), "uint8")
SPEC = {
    "layout": (HAND, IMAGE, ObsPart("task", "text", (3,), "uint8")),
    "action_width": 2, "low": (-1.0, 0.0), "high": (1.0, 3.0), "num_action_chunks": 2,
    "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "value_width": 2,
}  # fmt: skip
KINDS = ("openvla", "openvla_oft")


def make(kind, seed=0, **changes):
    policy = VlaPolicy(VlaSpec(model_type=kind, **SPEC | changes), seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():  # far from the start, where all scores are alike
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return policy.double()


def look(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    text = torch.randint(0, 128, (*shape, 3), generator=generator, dtype=torch.uint8)
    picture = torch.randint(0, 256, (*shape, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return TensorDict({NUMBERS: numbers, PICTURE: picture, TEXT: text}, batch_size=shape)


def bins(*shape, seed=2):
    return torch.randint(0, ACTION_BINS, (*shape, 4), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_a_rollout_is_what_is_trained_on(kind):
    """Importance ratios are one: acting, reviewing and running agree on the log-probabilities."""
    policy = make(kind)
    obs, final = look(3, 4), look(2, seed=5)
    noise = policy.head.noise((3, 3), torch.Generator().manual_seed(3)).double()
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
    columns = policy.head.evaluate(passed.outputs, chosen).log_probs
    torch.testing.assert_close(policy.log_probs(rows, chosen), columns)
    # What was sampled is the largest of score + noise.
    perturbed = (passed.outputs + noise.transpose(0, 1).flatten(0, 1)).unflatten(1, (4, -1))
    assert torch.equal(perturbed.argmax(-1), chosen)


def samples(policy, count=12, level=4):
    generator = torch.Generator().manual_seed(7)
    obs, actions = look(count), bins(count)
    log_probs = policy.log_probs(obs, actions).detach()
    noise, advantages = torch.randn(2, count, level, dtype=torch.float64, generator=generator)
    values, returns = torch.randn(2, count, 2, dtype=torch.float64, generator=generator)
    mask = torch.rand(count, 2, generator=generator) > 0.3
    mask[:, 0] = True
    return Samples(obs, actions, log_probs + 0.1 * noise, advantages, values, returns, mask=mask)


def learner(policy, **plan):
    loss = ControlLoss(
        "vanilla",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        logprob_level="token_level",
        entropy_level="token_level",
        entropy_coeff=0.01,
    )
    return flat_learner(policy, loss, UpdatePlan(12, 1, **plan), OptimizerOptions(lr=1e-3), critic_lr=1e-2)


def gradients(policy, train_policy=True):
    made = learner(policy)
    made.engine.gradients(samples(policy), (made.loss if train_policy else made.critic_loss).function)
    return {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_no_gradient(kind):
    whole, parts = make(kind), make(kind)
    parts.micro_batch = 5
    expected, found = gradients(whole), gradients(parts)
    assert expected.keys() == found.keys() == dict(whole.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    moved = [name for name, gradient in expected.items() if gradient.any()]
    assert any("encoder" in name for name in moved)
    assert any("placeholders" in name for name in moved) == (kind == "openvla_oft")


def test_the_gradient_of_the_value_reaches_the_transformer():
    policy = make("openvla")
    found = gradients(policy, train_policy=False)
    assert found["critic.layers.0.weight"].any()
    assert not found["model.language.model.layers.0.mlp.up_proj.weight"].any()  # a warm-up trains the critic alone
    obs, actions = look(3), bins(3)
    passed = policy.run(obs, None, actions)
    policy.backward(passed, None, torch.ones_like(passed.values))
    assert policy.model.language.model.layers[0].mlp.up_proj.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_masked_actions_have_no_part_in_gradients(kind):
    first, second = make(kind), make(kind)
    given = samples(first)
    other = torch.where(given.mask.repeat_interleave(2, 1), given.actions, (given.actions + 9) % ACTION_BINS)
    learner(first).engine.gradients(given, learner(first).loss.function)
    changed = given.each(lambda column: other if column is given.actions else column)
    learner(second).engine.gradients(changed, learner(second).loss.function)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_makes_a_rewarded_action_likelier(kind):
    policy = make(kind, value_width=0).float()
    obs, actions = look(8).float(), bins(8)
    obs[PICTURE] = obs[PICTURE].to(torch.uint8)
    before = policy.log_probs(obs, actions).detach()
    advantages = torch.tensor([[1.0]] * 4 + [[-1.0]] * 4).expand(-1, 4)
    learner(policy).update(Samples(obs, actions, before, advantages), 0)
    change = policy.log_probs(obs, actions).detach() - before
    assert change[:4].mean() > 0.01
    assert change[4:].mean() < -0.01


def test_files_give_a_policy_back(tmp_path):
    policy = make("openvla_oft").float()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.spec == policy.spec
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), loaded.parameters(), strict=True))


def test_the_first_weights_come_from_the_seed_alone():
    state = torch.get_rng_state()
    one, two, other = (VlaPolicy(VlaSpec(model_type="openvla", **SPEC), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [policy.model.language.lm_head.weight for policy in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_picture_alone_or_numbers_alone_are_enough():
    bare, seen = make("openvla", layout=(HAND,)).float(), make("openvla", layout=(IMAGE,)).float()
    assert bare.act(bare.inputs({"hand": torch.randn(5, 4)}), None).shape == (5, 4)
    assert seen.act(seen.inputs({"image": torch.zeros(5, 8, 8, 3, dtype=torch.uint8)}), None).shape == (5, 4)


class TestLora:
    @pytest.fixture(autouse=True)
    def _peft(self):
        pytest.importorskip("peft")

    def test_it_starts_as_the_policy_itself_and_trains_the_adapters_and_the_critic(self):
        plain = make("openvla")
        adapted = VlaPolicy(VlaSpec(model_type="openvla", **SPEC, lora_rank=2), seed=5).double()
        adapted.load_plain(plain.plain_state())
        obs, actions = look(4), bins(4)
        torch.testing.assert_close(adapted.outputs(obs, None, actions), plain.outputs(obs, None, actions))
        torch.testing.assert_close(adapted.values(obs), plain.values(obs))
        policy_side, critic = adapted.parameter_groups()
        names = {name for name, value in adapted.named_parameters() if any(value is one for one in policy_side)}
        assert names
        assert all("lora_" in name for name in names)
        assert len(critic) == 5

    def test_an_update_changes_nothing_else_and_merges(self):
        adapted = make("openvla_oft", lora_rank=2)
        before = {name: value.clone() for name, value in adapted.state_dict().items()}
        learner(adapted).update(samples(adapted), 0)
        after = adapted.state_dict()
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert changed
        assert all("lora_" in name or name.startswith("critic.") for name in changed)
        plain = make("openvla_oft", seed=9)
        plain.load_plain(adapted.plain_state())
        obs, actions = look(4), bins(4)
        torch.testing.assert_close(plain.outputs(obs, None, actions), adapted.outputs(obs, None, actions))

    def test_files_give_adapters_back(self, tmp_path):
        adapted = make("openvla", lora_rank=2).float()
        save_policy(adapted, tmp_path / "policy")
        loaded = load_policy(tmp_path / "policy")
        obs, actions = look(4).float(), bins(4)
        obs[PICTURE] = obs[PICTURE].to(torch.uint8)
        assert torch.equal(loaded.outputs(obs, None, actions), adapted.outputs(obs, None, actions))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_that_does_not_fit_passes_in_smaller_parts(kind, monkeypatch):
    policy = make(kind)
    obs, final, actions = look(5, 4), look(6, seed=5), bins(5, 3)
    at = (torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long))

    def review():
        return policy.review(obs, torch.zeros(5, 4, dtype=torch.bool), torch.zeros(5, 0), final, at, actions)

    whole, prompt = review(), VlaModel.prompt

    def fail_on_many(self, seen):
        if len(seen) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prompt(self, seen)

    monkeypatch.setattr(VlaModel, "prompt", fail_on_many)
    found = retry_with_smaller_micro_batches(policy, review, 15)
    assert policy.micro_batch == 3  # 15, 7, 3
    for part in ("outputs", "values", "final_values"):
        torch.testing.assert_close(getattr(found, part), getattr(whole, part))
    policy.outputs(obs[:, :-1].flatten(), None, actions.flatten(0, 1))  # of the KL of a rollout
