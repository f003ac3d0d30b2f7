"""lerobot's own pi0 and pi0.5, small: the same flow as its own sampling and loss, its files, imitation and PPO.

Skipped where lerobot is not installed; `scripts/test_lerobot.sh` makes an environment with it and runs them.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations.robots.flow.test_chain import METHODS
from tether.control.policies.mlp_policy import load_policy, save_policy
from tether.integrations.robots.flow.backbone import TOKEN_MASK, TOKENS, Sizes
from tether.integrations.robots.flow.policy import FlowPolicy
from tether.integrations.robots.flow.pretrained import PROCESSOR, is_pretrained, load_weights, read_pretrained, scale_of
from tether.integrations.robots.flow.prompts import VOCAB_SIZE
from tether.integrations.robots.flow.spec import FlowSpec
from tether.observations import ObsPart

pytest.importorskip("lerobot", reason="needs lerobot: bash scripts/test_lerobot.sh")

LAYOUT = (
    ObsPart("hand", "vector", (3,)),
    ObsPart("image", "image", (16, 16, 3), "uint8"),
    ObsPart("task", "text", (5,), "uint8"),
)
KINDS = ("pi0", "pi05")


def spec_of(kind, **changes):
    fields = {
        "layout": LAYOUT, "action_dim": 2, "action_scale": ((0.5, 0.0), (2.0, 1.0)),
        "state_scale": ((0.0,) * 3, (1.0,) * 3), "num_action_chunks": 2, "horizon": 3, "latent_dim": 4, "state_dim": 5,
        "prompt_length": 60, "image_size": 16, "sizes": vars(Sizes.of(32, 2, 16)), "value_width": 1, "num_steps": 3,
    }  # fmt: skip
    return FlowSpec(kind, **(fields | changes))


def make(kind, seed=0, **changes):
    policy = FlowPolicy(spec_of(kind, **changes), seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def shown(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "hand": torch.rand(*shape, 3, generator=generator) * 2 - 1,
        "image": torch.randint(0, 256, (*shape, 16, 16, 3), generator=generator, dtype=torch.uint8),
        "task": torch.randint(97, 123, (*shape, 5), generator=generator, dtype=torch.uint8),
    }


def lerobots_batch(policy, obs, read):
    """The same observations as lerobot's policy takes them."""
    return {
        "observation.images.image": obs["image"].permute(0, 3, 1, 2).float() / 255,
        "observation.state": obs["hand"],
        "observation.language.tokens": read[TOKENS],
        "observation.language.attention_mask": read[TOKEN_MASK],
    }


def with_features(policy):
    """lerobot's policy, told of the features that its own methods look up."""
    from lerobot.configs import FeatureType, PolicyFeature

    network = policy.model.policy
    picture = PolicyFeature(FeatureType.VISUAL, (3, 16, 16))
    network.config.input_features = {
        "observation.images.image": picture,
        "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
    }
    network.config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    return network


@pytest.mark.parametrize("kind", KINDS)
def test_the_ode_is_lerobots_own_sampling(kind):
    policy = make(kind)
    obs = shown(5)
    read, network = policy.inputs(obs), with_features(policy)
    noise = torch.randn(5, 3, 4)
    expected = network.predict_action_chunk(lerobots_batch(policy, obs, read), noise=noise, num_steps=3)
    prefix, x = policy.model.prefix(read), noise
    for number in range(3):
        with torch.no_grad():
            velocity, _ = policy.model.velocity(prefix, x, torch.full((5,), 1 - number / 3))
        x = x - velocity / 3
    torch.testing.assert_close(x[:, :, :2], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_velocity_is_that_of_lerobots_loss(kind):
    """With noise = actions = x the flow's target is 0 and its point x, so that the loss is the squared velocity."""
    policy = make(kind)
    obs = policy.inputs(shown(4))
    x, t = torch.randn(4, 3, 4), torch.tensor([0.2, 0.5, 0.9, 1.0])
    velocity, _ = policy.model.velocity(policy.model.prefix(obs), x, t)
    torch.testing.assert_close(policy.model.matching_losses(obs, x, x, t), velocity.square(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_noise_reaches_the_critic_and_the_state_does(kind):
    policy = make(kind)
    obs = policy.inputs(shown(2))
    moved = policy.inputs(shown(2) | {"hand": -shown(2)["hand"]})
    assert not torch.allclose(policy.values(obs), policy.values(moved))
    noise = policy.head.noise((2,), torch.Generator().manual_seed(0))
    others = policy.head.noise((2,), torch.Generator().manual_seed(1))
    valued = [policy(obs, policy.act(obs, drawn))[1] for drawn in (noise, others)]
    torch.testing.assert_close(*valued)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_ratios_are_one_and_every_weight_that_is_read_has_a_gradient(kind, method):
    policy = make(kind, noise_method=method)
    obs = policy.inputs(shown(2, 3))
    noise = policy.head.noise((2, 2), torch.Generator().manual_seed(3))
    actions = torch.stack([policy.act(obs[:, c], noise[c]) for c in range(2)], dim=1)
    starts = torch.zeros(2, 3, dtype=torch.bool)
    none = policy.inputs(shown(0))
    at = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    said = policy.review(obs, starts, torch.zeros(2, 0), none, at, actions)
    rows = obs[:, :-1].flatten(0, 1), actions.flatten(0, 1)
    torch.testing.assert_close(said.outputs.flatten(0, 1), policy.run(rows[0], None, rows[1]).outputs)
    policy.log_probs(*rows).sum().backward()
    unread = {name for name, value in policy.model.named_parameters() if value.requires_grad and value.grad is None}
    last = "language_model.layers.1."  # only its keys and values are seen by the action expert
    assert all(last in name or "language_model.norm" in name for name in unread)
    assert policy.model.policy.model.action_out_proj.weight.grad.any()


def test_the_vision_language_part_can_be_left_as_it_is():
    policy = make("pi0", train_expert_only=True)
    names = {id(value): name for name, value in policy.named_parameters()}
    trained = {names[id(value)] for value in policy.parameter_groups()[0]}
    assert trained
    assert not any(".paligemma." in name for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_give_a_policy_back(kind, tmp_path):
    policy = make(kind)
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    obs = policy.inputs(shown(3))
    noise = policy.head.noise((3,), torch.Generator().manual_seed(0))
    assert torch.equal(policy.act(obs, noise), loaded.act(obs, noise))


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """A policy as lerobot itself saves it, with the statistics of a normalizer."""
    policy = make(request.param, seed=4)
    with_features(policy).save_pretrained(tmp_path)
    state = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    mode = "MEAN_STD" if request.param == "pi0" else "QUANTILES"
    steps = [
        {"registry_name": "rename_observations_processor", "config": {}},
        {
            "registry_name": "normalizer_processor",
            "config": {"eps": 1e-8, "norm_map": {"STATE": mode, "ACTION": mode}},
            "state_file": state,
        },
    ]
    (tmp_path / PROCESSOR).write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    columns = {"mean": 1.0, "std": 2.0, "q01": -1.0, "q99": 3.0}
    statistics = {f"action.{name}": torch.full((2,), value) for name, value in columns.items()}
    save_file(statistics, tmp_path / state)
    return policy, tmp_path


def test_a_folder_of_lerobots_is_described_and_loaded(folder):
    policy, path = folder
    assert is_pretrained(path)
    found = read_pretrained(path)
    shape = policy.spec
    assert (found.model_type, found.horizon, found.latent_dim) == (shape.model_type, shape.horizon, shape.latent_dim)
    assert found.sizes == dict(shape.sizes)
    assert found.sizes["vocab_size"] == VOCAB_SIZE
    assert (found.cameras, found.action_dim) == (1, 2)
    np.testing.assert_allclose(found.action_scale, ((1.0, 1.0), (2.0, 2.0)), rtol=1e-6)
    assert found.state_scale is None
    other = make(shape.model_type, seed=9)
    load_weights(other, path)
    for name, value in policy.model.named_parameters():
        if not name.endswith("lm_head.weight"):
            assert torch.equal(value, other.model.get_parameter(name)), name


def test_weights_of_another_shape_or_kind_are_named(folder):
    policy, path = folder
    wider = make(policy.spec.model_type, latent_dim=6)
    with pytest.raises(ValueError, match="has the shape"):
        load_weights(wider, path)
    weights = load_file(path / "model.safetensors")
    del weights["model.action_out_proj.bias"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing weights .*action_out_proj\.bias"):
        load_weights(make(policy.spec.model_type), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"type": "act"}))
    with pytest.raises(ValueError, match="is of type act"):
        read_pretrained(path)


def test_files_that_keep_the_other_of_two_shared_weights_and_other_times(folder):
    policy, path = folder
    weights = load_file(path / "model.safetensors")
    language = "model.paligemma_with_expert.paligemma."
    tokens = weights.pop(f"{language}model.language_model.embed_tokens.weight")
    save_file(weights | {f"{language}lm_head.weight": tokens.clone()}, path / "model.safetensors")
    assert read_pretrained(path).sizes == dict(policy.spec.sizes)
    other = make(policy.spec.model_type, seed=9)
    load_weights(other, path)
    obs = policy.inputs(shown(3))
    noise = policy.head.noise((3,), torch.Generator().manual_seed(0))
    assert torch.equal(policy.act(obs, noise), other.act(obs, noise))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"min_period": 0.1}))
    with pytest.raises(ValueError, match=r"min_period=0\.1"):
        read_pretrained(path)


def test_a_normalization_that_is_not_known_is_named():
    assert scale_of("IDENTITY", {"mean": torch.zeros(2)}, "here") == ((0.0, 0.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="here=LOG"):
        scale_of("LOG", {"mean": torch.zeros(2)}, "here")
